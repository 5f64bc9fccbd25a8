"""Training: `train(config)` runs or resumes a run and returns its summary."""

from ping_llm.training.loop import train

__all__ = ["train"]
