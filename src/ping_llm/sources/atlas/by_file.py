"""Each file of RIPE Atlas ping results becomes a Parquet file of its own: for the daily dumps of weeks and years.

A ledger says what is done: a small JSON file for each input, written after the Parquet file that it vouches for. An
input without an entry, with another size or time than its entry has, or whose Parquet file is not there as it was, is
simply imported again. So an import that was stopped continues where it was, one with more files does only those, and a
damaged file is reported at the end without holding up the rest.
"""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from ping_llm.core.console import Advance, no_progress
from ping_llm.core.errors import PingLlmError
from ping_llm.core.files import file_sha256
from ping_llm.sources.atlas.chunks import InputCounts, parse_file
from ping_llm.sources.atlas.importer import (
    LEDGER,
    PATTERN,
    REQUESTS_AT_ONCE,
    ImportReport,
    check_inputs,
    check_packets,
    write_measurements,
)
from ping_llm.storage import Location, MissingError, locate
from ping_llm.tasks.engines import EngineChoice, OnTiming

PARSER_VERSION: Final = 1
"""Raised when the same input gives other measurements than before; older entries are then imported again."""


@dataclass(kw_only=True)
class ByFileReport(ImportReport):
    """Counts all files that were named, those that an earlier import did included."""

    skipped: int
    """Files that were done before and have not changed."""
    failures: dict[str, str]
    """Files that could not be read, and why."""


@dataclass(kw_only=True)
class LedgerEntry(InputCounts):
    """An input file as it is found, and what became of it."""

    modified_ns: int
    packets: str
    parser: int = PARSER_VERSION
    output: str | None = None
    """The Parquet file; there is none if the input held no ping, or could not be read."""
    output_bytes: int = 0
    sha256: str | None = None
    seconds: float = 0.0
    error: str | None = None
    """Why the input could not be read. It is tried again by the next import."""

    @property
    def name(self) -> str:
        return locate(self.file).name

    def still_holds(self, found: "LedgerEntry", output_bytes: int | None) -> bool:
        """Whether the input is as it was (as `found` says), and the Parquet file of this size what was written."""
        seen = ("bytes", "modified_ns", "packets", "parser")
        unchanged = all(getattr(self, name) == getattr(found, name) for name in seen)
        return self.error is None and unchanged and (self.output is None or self.output_bytes == output_bytes)

    def write(self, folder: Location) -> None:
        value = asdict(self)
        value["input"] = value.pop("file")
        (folder / LEDGER / f"{self.name}.json").write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")

    @classmethod
    def read(cls, file: Location) -> Self:
        try:
            value = json.loads(file.read_text())
            return cls(**{"file" if name == "input" else name: content for name, content in value.items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise PingLlmError(f"{file} is not an entry of this program's ledger: {error}; delete it") from error


def import_by_file(
    files: Sequence[Path | str],
    output: Path | str,
    *,
    packets: str = "min",
    strict: bool = False,
    overwrite: bool = False,
    engine: EngineChoice | None = None,
    on_progress: Advance = no_progress,
    on_timing: OnTiming | None = None,
) -> ByFileReport:
    """Import those files that are new, changed or could not be read before. With `overwrite`, all of them.

    `strict` stops at the first file that cannot be read and at the first result that cannot be used.
    """
    started = time.perf_counter()
    check_packets(packets)
    folder = _absolute(output)
    _check_folder(folder, packets, overwrite)
    found = _inputs(files, packets)
    entries = {} if overwrite else _done(found, folder)
    todo = [entry for entry in found if entry.name not in entries]
    skipped, total = len(entries), sum(entry.bytes for entry in found)
    on_progress(total - sum(entry.bytes for entry in todo), total=total)
    try:
        if todo and folder.is_local:
            (folder.local / LEDGER).mkdir(parents=True, exist_ok=True)
        if todo:
            with (engine or EngineChoice()).open() as running:
                for done in running.map(partial(import_file, folder=folder, strict=strict), todo):
                    entry = entries[done.value.name] = done.value
                    on_progress(entry.bytes)
                    if on_timing is not None:
                        sizes = {"bytes_in": entry.bytes, "bytes_out": entry.output_bytes}
                        on_timing(done.timing("import", entry.name, **sizes))
    except OSError as error:
        raise PingLlmError(f"{folder}: cannot be written: {error.strerror or error}") from error
    imported = tuple(entries[entry.name] for entry in found)
    return ByFileReport(
        seconds=time.perf_counter() - started,
        files=tuple(entry.output for entry in imported if entry.output),
        inputs=imported,
        skipped=skipped,
        failures={entry.file: entry.error for entry in imported if entry.error is not None},
    )


def import_file(found: LedgerEntry, *, folder: Location, strict: bool) -> LedgerEntry:
    """A worker's task: one input file becomes one Parquet file and one entry of the ledger."""
    started = time.perf_counter()
    target = folder / f"{found.name}.parquet"
    counts = InputCounts(file=found.file, bytes=found.bytes)
    became: dict[str, Any] = {}
    # Beside the output, where there is room for it; in the system's folder if that is in a store.
    scratch = None if folder.is_remote else str(folder.local / LEDGER)
    with tempfile.TemporaryDirectory(prefix="ping-llm-", dir=scratch) as unfinished:
        try:
            parsed = parse_file(counts, each_packet=found.packets == "each", strict=strict)
            for name in write_measurements((chunk.batch for chunk in parsed), Path(unfinished)):  # one, or none
                path = Path(unfinished) / f"{name}.tmp"
                became = {"output": target.name, "output_bytes": path.stat().st_size, "sha256": file_sha256(path)}
                target.upload(path)
        except PingLlmError as problem:
            if strict:
                raise
            counts, became = InputCounts(file=found.file, bytes=found.bytes), {"error": str(problem)}
    if "output" not in became:
        target.delete()  # of an input that has changed
    became |= {"dropped": dict(sorted(counts.dropped.items())), "seconds": round(time.perf_counter() - started, 3)}
    entry = LedgerEntry(**asdict(found) | asdict(counts) | became)
    entry.write(folder)
    return entry


def _absolute(path: Path | str) -> Location:
    location = locate(path)
    return locate(location.local.absolute()) if location.is_local else location


def _check_folder(folder: Location, packets: str, overwrite: bool) -> None:
    if folder.is_file():
        raise PingLlmError(f"{folder}: is a file; the output must be a folder")
    if folder.glob(PATTERN):
        raise PingLlmError(f"{folder}: holds measurements that were not imported file by file; choose another folder")
    for file in (folder / LEDGER).list()[:1]:
        before = LedgerEntry.read(file).packets
        if before != packets and not overwrite:
            raise PingLlmError(f"{folder}: was imported with --packets {before}; choose another folder, or overwrite")


def _inputs(files: Sequence[Path | str], packets: str) -> list[LedgerEntry]:
    """The input files as they are now, with nothing imported yet."""
    sources = [_absolute(file) for file in files]
    for name, count in Counter(source.name for source in sources).items():
        if count > 1:
            raise PingLlmError(
                f"{count} input files are called {name}, and so would be what they become; import them to two folders"
            )
    return [
        LedgerEntry(file=str(source), bytes=size, modified_ns=modified_ns, packets=packets)
        for source, (size, modified_ns) in zip(sources, check_inputs(sources), strict=True)
    ]


def _done(found: Sequence[LedgerEntry], folder: Location) -> dict[str, LedgerEntry]:
    """The entries of files that need not be imported again, by name."""
    sizes = {file.name: file.size() for file in folder.list()}
    ledger = {file.name.removesuffix(".json"): file for file in (folder / LEDGER).list()}

    def read(now: LedgerEntry) -> LedgerEntry | None:
        try:
            entry = LedgerEntry.read(ledger[now.name])
        except MissingError:
            return None
        return entry if entry.still_holds(now, sizes.get(entry.output or "")) else None

    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        known = threads.map(read, [entry for entry in found if entry.name in ledger])
        return {entry.name: entry for entry in known if entry is not None}
