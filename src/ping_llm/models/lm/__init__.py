"""The byte language model: a decoder-only transformer over packed sequences."""

from ping_llm.models.lm.transformer import ModelSettings, Transformer

__all__ = ["ModelSettings", "Transformer"]
