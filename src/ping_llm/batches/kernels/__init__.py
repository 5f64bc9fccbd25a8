"""The inner loops of the pipeline, compiled: from random numbers over the plan to tokens and arrays.

The tests hold a plain NumPy version of each (`tests/reference_*.py`), which is the specification: both agree to the
last bit.
"""

from importlib import import_module


def load() -> None:
    """Load all kernels, so that those which are not in the cache are compiled now, once, and not in every worker."""
    for name in ("segments", "kernels.planning", "kernels.writing"):
        import_module(f"ping_llm.batches.{name}")
