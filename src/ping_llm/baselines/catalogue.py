"""The baselines that every comparison should show, with the settings that proved best."""

from ping_llm.baselines.dmfsgd import Dmfsgd
from ping_llm.baselines.interface import Baseline
from ping_llm.baselines.log_factors import LogFactors
from ping_llm.baselines.medians import GlobalMedian, PairMedian
from ping_llm.baselines.sequential import LastValue, MedianOfLast, MovingAverage
from ping_llm.baselines.sgd import Descent
from ping_llm.baselines.vivaldi import Vivaldi


def standard_baselines(*, symmetric: bool = False, seed: int = 0) -> list[Baseline]:
    """All of them, simplest first. `symmetric` for data where RTT(i, j) = RTT(j, i)."""
    vivaldi = Vivaldi(descent=Descent(rate=0.03, seed=seed))
    return [
        GlobalMedian(),
        PairMedian(),
        LastValue(),
        MedianOfLast(),
        MovingAverage(),
        vivaldi,
        Dmfsgd(symmetric=symmetric, descent=Descent(seed=seed)),
        LogFactors(symmetric=symmetric, seed=seed),
        LogFactors(symmetric=symmetric, seed=seed, base=vivaldi, name="vivaldi + log factors"),
    ]
