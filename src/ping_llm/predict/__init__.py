"""Predictions from trained models: `Predictor` for both kinds; `scoring` for what only the language model knows."""
