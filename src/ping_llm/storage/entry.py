"""What a store says about a path, and what it opens."""

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, kw_only=True)
class Entry:
    kind: Literal["file", "folder", "missing"]
    size: int = 0
    modified_ns: int = 0


class RandomFile(Protocol):
    """Reads at any place, by several threads if need be."""

    def read_at(self, nbytes: int, offset: int) -> bytes: ...

    def size(self) -> int: ...

    def close(self) -> None: ...
