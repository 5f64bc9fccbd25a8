"""Evaluation: models beside the classical predictors, on measurements that none of them has seen.

split      which measurements are learned from, known, or asked about; as arrays and as files
protocols  who is asked what; the truth about simulated measurements
scores     how good the answers are: names, tables, JSON
plots      pictures
"""

from ping_llm.evaluate.protocols import EvaluatedPredictor, evaluate
from ping_llm.evaluate.scores import Evaluation

__all__ = ["EvaluatedPredictor", "Evaluation", "evaluate"]
