"""Classical predictors of latency: what a learned model has to beat, made as strong as they can be.

interface    what a baseline is
registry     all of them; a new one is a file and a line there
pairs        one value for each measured pair; global median
factors      matrix factorisation of ln RTT by robust alternating least squares; pair median
coordinates  network coordinates (Vivaldi) and DMFSGD, by minibatch gradient descent
sequential   last value, median of the last few, moving average
prefix_trees gradient-boosted trees on the prefixes of addresses
forecasts    a distribution of errors around any of them, and P(failed)
"""

from ping_llm.baselines.coordinates import Descent, Dmfsgd, Vivaldi
from ping_llm.baselines.factors import LogFactors, PairMedian
from ping_llm.baselines.forecasts import FailureRates, FittedHistory, PointWithResiduals, Rehearsal, WithResiduals
from ping_llm.baselines.interface import Baseline, FittedBaseline
from ping_llm.baselines.pairs import GlobalMedian, PairTable
from ping_llm.baselines.prefix_trees import PrefixTrees
from ping_llm.baselines.registry import standard_baselines
from ping_llm.baselines.sequential import LastValue, MedianOfLast, MovingAverage

__all__ = [
    "Baseline",
    "Descent",
    "Dmfsgd",
    "FailureRates",
    "FittedBaseline",
    "FittedHistory",
    "GlobalMedian",
    "LastValue",
    "LogFactors",
    "MedianOfLast",
    "MovingAverage",
    "PairMedian",
    "PairTable",
    "PointWithResiduals",
    "PrefixTrees",
    "Rehearsal",
    "Vivaldi",
    "WithResiduals",
    "standard_baselines",
]
