"""ping-llm: a language model of the Internet, learned from latency measurements.

>>> from ping_llm import Predictor
"""

from typing import TYPE_CHECKING, Any

from ping_llm.core.errors import DroppedRowsWarning, PingLlmError

if TYPE_CHECKING:
    from ping_llm.predict.predictor import Predictor as Predictor

__version__ = "0.1.0"
__all__ = ["DroppedRowsWarning", "PingLlmError", "Predictor", "__version__"]


def __getattr__(name: str) -> Any:
    """Importing the package costs nothing: what needs JAX is imported when it is named."""
    if name == "Predictor":
        from ping_llm.predict.predictor import Predictor

        return Predictor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
