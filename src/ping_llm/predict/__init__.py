"""Predictions from trained models."""

from ping_llm.predict.forecast import RttForecast
from ping_llm.predict.language_model import LanguageModel

__all__ = ["LanguageModel", "RttForecast"]
