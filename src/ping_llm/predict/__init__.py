"""Predictions from trained models."""

from ping_llm.core.distribution import RttDistribution
from ping_llm.predict.language_model import LanguageModel
from ping_llm.predict.predictor import Predictor

__all__ = ["LanguageModel", "Predictor", "RttDistribution"]
