"""Evaluation: a model beside the classical predictors, on measurements that none of them has seen."""

from ping_llm.evaluate.probes import evaluate_probes

__all__ = ["evaluate_probes"]
