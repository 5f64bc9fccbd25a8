"""The byte language model: a decoder-only transformer over packed sequences."""

from ping_llm.model.settings import ModelSettings
from ping_llm.model.transformer import Transformer

__all__ = ["ModelSettings", "Transformer"]
