"""Evaluation: models beside the classical predictors, on measurements that none of them has seen.

observations, split   what was measured, and which of it is learnt from, known, or asked
protocols             who is asked what
oracle                the truth about simulated measurements
scores, results       how good the answers are
table, plots          for people
"""

from ping_llm.evaluate.protocols import Predictor, evaluate
from ping_llm.evaluate.scores import Evaluation, scores

__all__ = ["Evaluation", "Predictor", "evaluate", "scores"]
