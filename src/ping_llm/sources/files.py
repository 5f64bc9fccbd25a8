"""Measurement files of any accepted format: finding them, cutting them into pieces of work, reading the pieces.

A *piece* is what one task reads: a range of row groups of a Parquet file, or a whole text file. Pieces are read as
batches whose columns have the schema's names; the values are still as the user wrote them (`measurements.validate`
judges them).

To add a format: a line in `FORMATS`, and a module with two functions (those of `parquet.py` are short):

    plan_NAME(whole, options, piece_rows, optional)   rows (None where only reading tells) and pieces of a file
    read_NAME(piece, batch_rows, strict)              the `RawBatch`es of a piece
"""

import glob
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from ping_llm.core.cells import PLAIN, Spelling
from ping_llm.core.errors import MeasurementError, PingLlmError, printable
from ping_llm.sources import NODES_FILE, ROWS_FILE, SPLIT_FILE, WORLD_FILE
from ping_llm.sources.columns import OPTIONAL_COLUMNS, InputOptions, is_list
from ping_llm.sources.contents import BLOCK_BYTES, open_text, readable, refuse_foreign
from ping_llm.storage import Location, locate
from ping_llm.storage.location import split_pattern


@dataclass(frozen=True, kw_only=True)
class Format:
    """A kind of measurement file."""

    module: str
    is_of: Callable[[bytes], object]
    """Whether a file that begins with these bytes (decompressed) is one."""
    suffixes: tuple[str, ...] = ()
    """Only choose among the files of a folder; what a file is, its content says."""


_OF_TOOLS: Final = re.compile(
    rb"\ARRD\0|<rrd>|\A[^\n,;]*\b(?:ping1|median)\b"  # SmokePing
    rb'|"mtr"|\AMtr_Version,|HOST: \S+\s+Loss%|"asn"|"ping_sent"|"cycle-start"'
    rb'|"status"|"metric"|(?:average_response_ms|rtt_ms|rtt_avg|rtt|response_time)='  # Prometheus, InfluxDB
    rb"|\s: \[\d+\], |\s: xmt/rcv/| is alive| is unreachable|\s:(?: (?:-|\d[\d.]*))+[ \t\r]*$"  # fping
    rb"|PING|seq[= ]\d| packets transmitted|[=<]\d+ ?(?:ms|\xd0\xbc\xd1\x81)|\b32 [^=\n]{0,200}:[ \t\r]*$",
    re.MULTILINE,
)
"""What is in whatever a tool writes. Only where it is, the readers of tools are asked."""
_TOOLS_BYTES: Final = 1 << 14


def _is_of_tool(start: bytes) -> bool:
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):  # as PowerShell writes
        start = start.decode("utf-16", errors="replace").encode(errors="replace")
    if not _OF_TOOLS.search(start, 0, _TOOLS_BYTES):
        return False
    from ping_llm.sources.tools import is_tool

    return is_tool(start)


_JSON: Final = rb"^(?:\xef\xbb\xbf)?\s*"
FORMATS: Final = {
    "parquet": Format(
        module="ping_llm.sources.parquet", is_of=re.compile(rb"PAR1").match, suffixes=(".parquet", ".pq")
    ),
    "tool": Format(module="ping_llm.sources.tools", is_of=_is_of_tool, suffixes=(".rrd",)),
    "atlas": Format(
        module="ping_llm.sources.atlas_results",
        is_of=re.compile(_JSON + rb'[\[{].*?"(?:prb_id|msm_id|fw|msm_name)"\s*:', re.DOTALL).match,
        suffixes=(".json", ".jsonl", ".ndjson"),
    ),
    "objects": Format(
        module="ping_llm.sources.objects",
        is_of=re.compile(_JSON + rb'(?:\[?\s*\{\s*["}]|\[\s*\])').match,
    ),
    "csv": Format(  # any other text, in UTF-16, too, but not what spreadsheets write
        module="ping_llm.sources.tables",
        is_of=re.compile(rb"\xff\xfe|\xfe\xff|(?!PK)[^\0]*\Z").match,
        suffixes=(".csv", ".tsv"),
    ),
}
"""A file is of the first of these that it may be of."""

SERVERS: Final = ("prometheus+http://", "prometheus+https://", "atlas:")
"""What begins like this is not the name of a file: see `remote`."""

_KNOWN_NAMES: Final = (
    "Parquet, CSV and other text tables, JSON, RIPE Atlas results, what ping tools write; "
    "also compressed with gzip, bzip2, zstd or xz"
)


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file as it was when the work was planned; size and time tell whether it is still the same."""

    path: str
    format: str
    bytes: int
    mtime_ns: int
    measurements: int | None  # known without reading for Parquet only


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of one file that is read by one task."""

    path: str
    format: str
    columns: dict[str, str]  # the file's name of each schema column
    bytes: int
    spelling: Spelling = PLAIN
    layout: Any = None  # of a text table
    understood: str = ""  # what the file was taken for, in words
    row_groups: tuple[int, int] | None = None
    first_row: int = 0


Plan = tuple[int | None, list[Piece]]


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """Rows as they stand in the file, under the schema's names."""

    batch: pa.RecordBatch
    first_row: int  # number of the batch's first row in the file, counted from 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows that the reader itself could not make sense of, and that are not in the batch."""
    examples: Mapping[str, str] = field(default_factory=dict)
    """Of each reason, the first row that was dropped for it, in words."""


def expand(patterns: Iterable[str]) -> list[Location]:
    """The files that the given paths, folders and globs name, sorted, each once. They may be local or remote."""
    found: dict[str, Location] = {}
    for pattern in patterns:
        if pattern.lower().startswith(SERVERS):
            from ping_llm.sources.remote import download

            found.update({str(path): locate(path) for path in download(pattern)})
            continue
        where = locate(pattern)
        if where.is_dir():
            matches = _files_of(where)
        elif not (matches := [where] if where.exists() else _matching(where)):
            raise PingLlmError(f"no input file matches {pattern!r}")
        found.update({str(file): file for file in matches})
    if not found:
        raise PingLlmError("no input file was given, or the server has nothing of that time")
    return [found[name] for name in sorted(found)]


def distinct(paths: Iterable[Location]) -> tuple[list[Location], dict[str, str]]:
    """Files that have each a content of their own; and the others, each with the name of the one it is a copy of."""
    by_size: dict[int, list[Location]] = {}
    copies: dict[str, str] = {}
    for path in paths:
        alike = by_size.setdefault(path.size(), [])
        original = next((other for other in alike if _same_content(path, other)), None)
        if original is None:
            alike.append(path)
        else:
            copies[str(path)] = str(original)
    return sorted((path for alike in by_size.values() for path in alike), key=str), copies


def _same_content(one: Location, other: Location) -> bool:
    with readable(one), one.open_stream() as mine, other.open_stream() as theirs:
        while block := mine.read(1 << 20):
            if block != theirs.read(1 << 20):
                return False
    return True


def _files_of(folder: Location) -> list[Location]:
    files = {file.name: file for file in folder.list()}
    if SPLIT_FILE in files:
        raise PingLlmError(f"the folder {folder} is a split: what may be learned from is in {folder / 'train'}")
    if measured := [
        files[name] for name in files.keys() - {WORLD_FILE, ROWS_FILE, NODES_FILE} if _format_by_name(name)
    ]:
        return measured
    if logs := [file for file in files.values() if _is_log(file)]:
        return logs
    raise PingLlmError(
        f"the folder {folder} holds no measurement file (.parquet, .csv, .tsv, .jsonl, or output of a ping tool): "
        f"name others by themselves, as in {folder / '*.txt'}"
    )


def _is_log(path: Location) -> bool:
    with readable(path), open_text(str(path)) as stream:
        return _is_of_tool(stream.read(BLOCK_BYTES))


def _matching(pattern: Location) -> list[Location]:
    if pattern.is_local:
        found = glob.glob(pattern.path, recursive=True)  # noqa: PTH207
        return [locate(path) for path in sorted(found) if Path(path).is_file()]
    folder, rest = split_pattern(pattern.path)
    if not glob.has_magic(rest):
        return []
    if not folder:
        raise PingLlmError(f"{pattern}: the name of the bucket must be written out")
    return Location(scheme=pattern.scheme, path=folder).glob(rest)


def describe(
    path: Location | Path, options: InputOptions, piece_rows: int, optional: frozenset[str] = OPTIONAL_COLUMNS
) -> tuple[InputFile, list[Piece]]:
    """Look at a file (not at its measurements): what it is, and the pieces to read it in.

    `optional` columns need not be there.
    """
    with readable(path):
        stat = locate(path).stat()
        kind = _format_of(locate(path))
        whole = Piece(path=str(path), format=kind, columns={}, bytes=stat.size)
        measurements, pieces = _function("plan", kind)(whole, options, piece_rows, optional)
    file = InputFile(path=str(path), format=kind, bytes=stat.size, mtime_ns=stat.mtime_ns, measurements=measurements)
    return file, pieces


def row_in_words(piece: Piece, raw: RawBatch, position: int, columns: Iterable[str] | None = None) -> str:
    """Where a row of a batch stands in its file, and its cells."""
    row = raw.first_row + position
    where = (
        f"line {row + 1 + piece.layout.skipped}"
        if piece.layout is not None and not piece.layout.is_matrix
        else f"row {row}"
    )
    names = [name for name in columns or raw.batch.schema.names if name in raw.batch.schema.names]
    return f"{where}: " + ", ".join(f"{name}={str(raw.batch.column(name)[position].as_py())[:60]}" for name in names)


_AT_FAULT: Final = {
    "missing_time": ("event_time",),
    "bad_time": ("event_time",),
    "bad_src_addr": ("src_addr",),
    "bad_dst_addr": ("dst_addr",),
    "family_mismatch": ("src_addr", "dst_addr"),
}


def examples_of(piece: Piece, raw: RawBatch, first_dropped: Mapping[str, int]) -> dict[str, str]:
    """Of each reason, the first row of a batch that was dropped for it."""
    found = {
        reason: row_in_words(piece, raw, position, _AT_FAULT.get(reason, ("rtt",)))
        for reason, position in first_dropped.items()
    }
    return {**found, **raw.examples}


def read(piece: Piece, batch_rows: int, *, strict: bool = False) -> Iterator[RawBatch]:
    """Read a piece in batches of at most about `batch_rows` rows."""
    with readable(piece.path):
        for raw in _function("read", piece.format)(piece, batch_rows, strict):
            is_one_each = "rtt" not in raw.batch.schema.names or not is_list(raw.batch["rtt"].type)
            yield raw if is_one_each else replace(raw, batch=_one_each(raw.batch))


def _one_each(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A row for each RTT of a list."""
    rtts = batch["rtt"]
    rows = batch.take(pc.list_parent_indices(rtts))
    return rows.set_column(batch.schema.get_field_index("rtt"), "rtt", rtts.flatten())


def _function(task: str, format: str) -> Any:
    return getattr(importlib.import_module(FORMATS[format].module), f"{task}_{format}")


def _format_of(path: Location) -> str:
    with open_text(str(path)) as stream:
        start = stream.read(BLOCK_BYTES)
    if not start:
        raise PingLlmError(f"{path} is empty")
    refuse_foreign(str(path), start)
    if found := next((name for name, kind in FORMATS.items() if kind.is_of(start)), None):
        return found
    raise PingLlmError(f"{path}: unknown kind of file (known: {_KNOWN_NAMES})")


def _format_by_name(name: str) -> str | None:
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    while suffixes and suffixes[-1] in {".gz", ".bz2", ".zst", ".xz"}:
        suffixes.pop()
    return next((name for name, kind in FORMATS.items() if suffixes and suffixes[-1] in kind.suffixes), None)


# What became of the rows.

MAX_BAD_SHARE: Final = 0.1
"""Of the rows. Where more cannot be used, the table was most likely misunderstood."""
_NO_FAULT: Final = frozenset({"duplicate", "not_ping"})
"""Reasons to leave a row out that say nothing against the others."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was understood of an input, and what became of its rows."""

    understood: tuple[str, ...] = ()
    """What each file or table was taken for, without repetitions."""
    rows: int = 0
    used: int = 0
    timeouts: int = 0
    nodes: int = 0
    names: int = 0
    """Of the nodes, those without an address."""
    begin_s: float | None = None
    end_s: float | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Rows that are not used, by reason (`measurements.DROP_REASONS`)."""
    examples: Mapping[str, str] = field(default_factory=dict)
    """Of each reason, the first such row."""

    @property
    def lines(self) -> tuple[str, str]:
        shown = "; ".join(self.understood[:2]) + (f"; and {len(self.understood) - 2} more" * (len(self.understood) > 2))
        named = f" ({self.names:,} by name)" if self.names else ""
        times = "no times"
        if self.begin_s is not None and self.end_s is not None:
            both = (f"{datetime.fromtimestamp(s, UTC):%Y-%m-%d %H:%M:%S}" for s in (self.begin_s, self.end_s))
            times = " to ".join(both) + " UTC"
        result = f"{self.used:,} of {self.rows:,} rows used"
        if self.nodes:  # else they were not counted
            result += f", {self.timeouts:,} of them timeouts; {self.nodes:,} nodes{named}; {times}"
        left_out = f"; left out: {self.in_words(2)}" if self.dropped else ""
        return printable(f"read: {shown or 'measurements'}"), printable(result + left_out)

    def in_words(self, examples: int) -> str:
        """What was left out, most first; with examples of so many reasons."""
        found = Counter(self.dropped).most_common()
        return ", ".join(
            f"{count:,} {reason}" + (f" ({self.examples[reason]})" if reason in self.examples and i < examples else "")
            for i, (reason, count) in enumerate(found)
        )

    def check(self, *, allow_bad_rows: bool) -> None:
        """An error if so few rows can be used that answers from them would mislead."""
        bad = sum(count for reason, count in self.dropped.items() if reason not in _NO_FAULT)
        if not self.used:
            raise MeasurementError(
                f"no usable measurement in the input; left out: {self.in_words(3) or 'none, it is empty'}"
            )
        if bad > MAX_BAD_SHARE * self.rows and not allow_bad_rows:
            raise PingLlmError(
                f"{bad:,} of {self.rows:,} rows cannot be used: {self.in_words(2)}; correct them, say how to read them "
                "(--columns, --rtt-unit, --delimiter), or go on without them: --allow-bad-rows"
            )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "lines": list(self.lines)}
