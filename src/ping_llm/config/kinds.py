"""The kinds of data there are: those that come with the package, and those that other packages add."""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final

DATASET_TYPES: Final = ("network", "grain", "hf", "tfds", "c4_mlperf", "synthetic", "worlds", "measured")
"""Those that come with the package."""

TEXT: Final = ("grain", "hf", "tfds", "c4_mlperf")
"""Those of them that need a tokenizer."""

GROUP: Final = "ping_llm.backends"
"""Entry points of this group are backends; docs/backends.md says what they must offer."""


@cache
def added() -> dict[str, EntryPoint]:
    """The backends of other packages, by the name that `dataset_type` calls them."""
    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in DATASET_TYPES}


def is_dataset_type(name: str) -> bool:
    return name in DATASET_TYPES or name in added()
