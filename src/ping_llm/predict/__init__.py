"""Predictions from trained models."""

from ping_llm.predict.language_model import LanguageModel, RttForecast

__all__ = ["LanguageModel", "RttForecast"]
