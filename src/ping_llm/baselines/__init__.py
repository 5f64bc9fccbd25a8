"""Classical predictors of latency: what a learnt model has to beat, made as strong as they can be.

interface    questions, observations, and what a baseline is
pairs        one value for each measured pair: what static baselines learn from
history      what was measured before a time: what causal baselines learn from
medians      global and pair median
sequential   last value, median of the last few, moving average
log_factors  matrix factorisation of ln RTT by robust alternating least squares
sgd          minibatch descent: for vivaldi (places and heights) and dmfsgd (matrix factorisation of RTT)
prefix_trees gradient-boosted trees on the prefixes of addresses
tuning       settings chosen on the training data
failures     P(failed)
known        what was known at the time of a question
residuals    distributions of errors; forecasts puts them around any baseline
catalogue    all of them
"""

from ping_llm.baselines.coordinates import Descent, Dmfsgd, Vivaldi
from ping_llm.baselines.factors import GlobalMedian, LogFactors, PairMedian
from ping_llm.baselines.forecasts import (
    FailureRates,
    FittedForecaster,
    Known,
    PointWithResiduals,
    Rehearsal,
    WithResiduals,
    with_residuals,
)
from ping_llm.baselines.interface import Baseline, FittedBaseline
from ping_llm.baselines.prefix_trees import PrefixTrees
from ping_llm.baselines.sequential import LastValue, MedianOfLast, MovingAverage
from ping_llm.baselines.tuning import BestOf, standard_baselines
from ping_llm.core.observations import NodeIds, Observations, Questions

__all__ = [
    "Baseline",
    "BestOf",
    "Descent",
    "Dmfsgd",
    "FailureRates",
    "FittedBaseline",
    "FittedForecaster",
    "GlobalMedian",
    "Known",
    "LastValue",
    "LogFactors",
    "MedianOfLast",
    "MovingAverage",
    "NodeIds",
    "Observations",
    "PairMedian",
    "PointWithResiduals",
    "PrefixTrees",
    "Questions",
    "Rehearsal",
    "Vivaldi",
    "WithResiduals",
    "standard_baselines",
    "with_residuals",
]
