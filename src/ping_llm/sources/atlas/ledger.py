"""The ledger of an import file by file: for each input file a small JSON file that says what became of it.

It is written after the Parquet file that it vouches for, so an input without an entry, with another size or time than
its entry has, or whose Parquet file is not there as it was, is simply imported again.
"""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from ping_llm.errors import PingLlmError
from ping_llm.storage import Location, MissingError

FOLDER: Final = "ledger"

REQUESTS_AT_ONCE: Final = 16

PARSER: Final = 1
"""Raised when the same input gives other measurements than before; older entries are then imported again."""


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    input: str
    bytes: int
    modified_ns: int
    packets: str
    parser: int
    output: str | None = None
    """The Parquet file; there is none if the input held no ping, or could not be read."""
    output_bytes: int = 0
    sha256: str | None = None
    results: int = 0
    measurements: int = 0
    failed: int = 0
    dropped: dict[str, int]
    examples: dict[str, str]
    seconds: float
    error: str | None = None
    """Why the input could not be read. It is tried again by the next import."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, text: str, where: Location) -> Self:
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise PingLlmError(f"{where} is not an entry of this program's ledger: {error}; delete it") from error


def entry_name(input_name: str) -> str:
    return f"{input_name}.json"


def output_name(input_name: str) -> str:
    return f"{input_name}.parquet"


def write_entry(output: Location, name: str, entry: LedgerEntry) -> None:
    (output / FOLDER / entry_name(name)).write_text(json.dumps(entry.to_json(), indent=1) + "\n")


def read_entries(output: Location, names: Iterable[str]) -> dict[str, LedgerEntry]:
    """The entries of those inputs that have one, by name."""
    there = {file.name for file in (output / FOLDER).list()}
    known = [name for name in names if entry_name(name) in there]

    def read(name: str) -> LedgerEntry | None:
        where = output / FOLDER / entry_name(name)
        try:
            return LedgerEntry.from_json(where.read_text(), where)
        except MissingError:
            return None

    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        entries = threads.map(read, known)
        return {name: entry for name, entry in zip(known, entries, strict=True) if entry is not None}


def packets_of(output: Location) -> str | None:
    """What the entries say about `--packets`, which must be the same for all files of a folder."""
    for file in (output / FOLDER).list():
        return LedgerEntry.from_json(file.read_text(), file).packets
    return None
