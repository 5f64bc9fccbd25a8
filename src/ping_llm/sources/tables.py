"""Tables as text: CSV of any delimiter, with a header or without, long (one measurement in a line) or a matrix.

The first block of a file tells its layout; the rest is read by Arrow at full speed, every cell as text. In a matrix,
the first row and the first column name the nodes; an empty cell there was not measured, `*` is a timeout.
"""

import csv
import io
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv as arrow_csv

from ping_llm.core.cells import DATE, MISSING_TEXT, split_units
from ping_llm.core.errors import MeasurementError, PingLlmError, explained
from ping_llm.core.measurements import UNPARSABLE, parse_addresses, parse_nodes
from ping_llm.sources.columns import (
    COLUMN_NAMES,
    OPTIONAL_IN_QUESTIONS,
    InputOptions,
    Understood,
    find_columns,
    split_unit,
    understand,
)
from ping_llm.sources.files import BLOCK_BYTES, Piece, Plan, RawBatch, open_text, readable

_DELIMITERS: Final = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars", " ": "spaces"}
_FEW_LINES: Final = 10
_MOST_BYTES: Final = 16 << 20  # in which there must be so many lines
_BYTES_PER_ROW: Final = 60  # a short line; only sets how many rows a block gives, so a batch never exceeds its size
_UNMEASURED: Final = MISSING_TEXT - {"*", "timeout", "timed out", "lost", "failed", "unreachable", "no reply"} | {"nan"}
_TIME_OF_DAY: Final = re.compile(r"^\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?\s*([AaPp][Mm])?$")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the cells of a text table are."""

    delimiter: str
    names: tuple[str, ...]
    """Of the columns; without a header they are numbers, from 1."""
    skipped: int
    """Lines before the first row."""
    time_of_day: str | None = None
    """The column that completes that of the date."""
    is_matrix: bool = False


def plan_csv(whole: Piece, options: InputOptions, piece_rows: int, optional: frozenset[str]) -> Plan:
    layout, found = look_at(_first_lines(whole.path), options, whole.path, optional)
    piece = replace(whole, columns=found.columns, spelling=found.spelling, layout=layout, understood=found.said)
    return None, [piece]


def _first_lines(path: str) -> list[str]:
    with open_text(path) as stream:
        start = stream.read(BLOCK_BYTES)
        while start.count(b"\n") < _FEW_LINES and len(start) < _MOST_BYTES and (more := stream.read(len(start))):
            start += more  # a wide matrix
        is_whole = not stream.read(1)
    try:  # what was read may end in the middle of a character
        text = start.decode("utf-8-sig", errors="strict" if is_whole else "ignore")
    except UnicodeDecodeError as error:
        raise PingLlmError(f"cannot read {path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    lines = re.split("\r\n|\n|\r", text)
    return lines if is_whole else lines[:-1] or lines


def look_at(
    lines: Sequence[str], options: InputOptions, what: str, optional: frozenset[str]
) -> tuple[Layout, Understood]:
    """The layout of a table that begins with these lines, and what its columns are."""
    first = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), None)
    if first is None:
        raise PingLlmError(f"{what}: the first line must name the columns")
    if stated := re.match(r"^sep=(.)\s*$", lines[first]):  # as Excel writes it
        first, options = first + 1, replace(options, delimiter=options.delimiter or stated[1])
    delimiter = options.delimiter or _delimiter(lines[first : first + 200])
    rows = [row for row in _cells(lines[first:], delimiter) if row]
    if not rows:
        raise PingLlmError(f"{what}: there is no row")
    if first and lines[first - 1].startswith("#") and _is_data(rows[0]):  # a header that is a comment
        named = next(iter(_cells([lines[first - 1].lstrip("# ")], delimiter)))
        if len(named) == len(rows[0]):
            rows, first = [named, *rows], first - 1
    width = _usual([len(row) for row in rows[1:] or rows])
    header, body = _header_and_rows(rows, width)
    layout, no_header = Layout(delimiter=delimiter, names=_unique(header), skipped=first + 1), ""
    try:
        find_columns(layout.names, options.columns, what, optional)
    except PingLlmError:
        if _is_matrix(header, body):
            return _matrix(layout, header, body, options, what)
        if not _is_data(header):
            raise
        body = [row for row in rows if len(row) == width]
        layout = replace(layout, names=tuple(str(i + 1) for i in range(width)), skipped=first)
        options = replace(options, columns=_by_type(layout.names, body, options.columns, what))
        no_header = "no header: columns by number, "
    sample = _sample(layout.names, body)
    columns = find_columns(layout.names, options.columns, what, optional)
    if both := _date_and_time(columns.get("event_time"), sample):
        date, clock = both
        sample[date] = pc.binary_join_element_wise(sample[date], sample[clock], " ")
        layout = replace(layout, time_of_day=clock)
        options = replace(options, columns={**options.columns, "event_time": date})
        no_header += f"time of day {clock!r}, "
    found = understand(layout.names, sample, options, what, optional)
    return layout, replace(found, said=f"{no_header}{found.said}; {_DELIMITERS.get(delimiter, repr(delimiter))}")


def _header_and_rows(rows: Sequence[list[str]], width: int) -> tuple[list[str], list[list[str]]]:
    """With as many cells in each, whichever of them has too few."""
    header, body = [cell.strip() for cell in rows[0]], [row for row in rows[1:] if len(row) == width]
    missing = [""] * (width - len(header))
    # A delimiter may end each row, or rows begin with names of their own.
    header = [*missing, *header] if any(row[-1] for row in body) else [*header, *missing]
    return header, [[*row, *[""] * (len(header) - width)] for row in body]  # the reader will say they are malformed


def _delimiter(lines: Sequence[str]) -> str:
    """The one that cuts most lines into equally many cells; blanks only if nothing else does."""
    scores = {}
    for delimiter in _DELIMITERS:
        counts = [len(row) for row in _cells(lines, delimiter) if row]
        width = _usual(counts) if counts else 1
        scores[delimiter] = min(width, 4) * counts.count(width) / max(1, len(counts)) if width > 1 else 0.0
    blanks = scores.pop(" ")
    best = max(scores, key=lambda one: scores[one])
    return " " if scores[best] < 2.4 and blanks > scores[best] else best


def _cells(lines: Sequence[str], delimiter: str) -> Iterator[list[str]]:
    if delimiter == " ":
        return (line.split() for line in lines)
    return csv.reader(lines, delimiter=delimiter)


def _usual(numbers: Sequence[int]) -> int:
    return Counter(numbers).most_common(1)[0][0]


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return tuple(unique)


def _sample(names: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {name: pa.array([row[i] for row in rows], pa.string()) for i, name in enumerate(names)}


# Without a header.


def _is_data(cells: Sequence[str]) -> bool:
    """Whether a row holds a number, a time or an address, as no header does."""
    families, _ = parse_addresses([cell.strip() for cell in cells])
    is_number = [bool(re.match(r"^\s*[-+]?\d[\d.,]*\s*[a-zµ]{0,2}\s*$", cell)) for cell in cells]
    return bool((families != UNPARSABLE).any()) or any(is_number) or any(re.match(DATE, cell) for cell in cells)


def _by_type(
    names: Sequence[str], rows: Sequence[Sequence[str]], given: Mapping[str, str], what: str
) -> dict[str, str]:
    """Which column of a table without a header is what: as it is given, else from the cells."""
    kinds: dict[str, list[str]] = {kind: [] for kind in ("time", "clock", "address", "number", "version", "name")}
    for name, column in _sample(names, rows).items():
        if name not in given.values():
            kinds[_kind(column)].append(name)
    numbers = kinds["number"]
    nodes = sorted(kinds["address"] if len(kinds["address"]) >= 2 else kinds["address"] + kinds["name"], key=int)
    if len(numbers) > 1:  # whole numbers are counts and sizes, if others are not
        split = [name for name in numbers if any(re.search(r"[.,]\d|[a-z]", row[int(name) - 1]) for row in rows)]
        numbers = split if len(split) == 1 else numbers
    found = dict(given)
    ends = [end for end in ("src_addr", "dst_addr") if end not in given]
    for wanted, columns in ((ends, nodes), ([name for name in ("rtt",) if name not in given], numbers)):
        if wanted and len(columns) != len(wanted):
            raise PingLlmError(
                f"{what}: there is no header, and the cells do not tell which column is {' and '.join(wanted)}: "
                "add one, or name columns by their numbers, such as --columns src_addr=1 --columns rtt=3"
            )
        found |= dict(zip(wanted, columns, strict=False))
    for column, kind in (("event_time", "time"), ("ip_version", "version")):
        if kinds[kind] and (column == "event_time" or kinds["address"]):
            found.setdefault(column, kinds[kind][0])
    return found


def _kind(column: Any) -> str:
    cells = [cell.strip() for cell in column.to_pylist()]
    cells = [cell for cell in cells if cell.lower() not in MISSING_TEXT] or [""]

    def mostly(flags: Any) -> bool:
        return bool(np.mean(np.asarray(flags, dtype=bool)) >= 0.8)

    values, _ = split_units(pc.replace_substring(pa.array(cells, pa.large_string()), ",", "."))
    if mostly(values >= 1e8) or mostly([re.match(DATE, cell) and not cell.isdigit() for cell in cells]):
        return "time"
    if mostly([_TIME_OF_DAY.match(cell) for cell in cells]):
        return "clock"
    if mostly([cell in ("4", "6") for cell in cells]):
        return "version"
    if mostly(~np.isnan(values)):
        return "number"
    return "address" if mostly(np.isin(parse_nodes(cells)[0], (4, 6))) else "name"


def _date_and_time(time: str | None, sample: Mapping[str, Any]) -> tuple[str, str] | None:
    """The columns of date and time of day, where `time`, which was taken for both, is one of them."""

    def first(is_one: Callable[[str], object]) -> str | None:
        cells = {name: [cell.strip() for cell in column.to_pylist()[:100]] for name, column in sample.items()}
        return next((name for name, own in cells.items() if any(own) and all(map(is_one, filter(None, own)))), None)

    date = first(lambda cell: ":" not in cell and re.match(DATE, cell))
    clock = first(_TIME_OF_DAY.match)
    return (date, clock) if date is not None and clock is not None and time in (date, clock) else None


# Matrices.


def _is_matrix(header: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row and column name nodes, and all other cells are RTTs."""
    if len(header) < 2 or not rows:
        return False
    across, down = set(header[1:]), {row[0].strip() for row in rows}
    families, _, _ = parse_nodes(sorted(across | down))
    if (families == UNPARSABLE).any() or len(across) < len(header) - 1:
        return False
    usual = {name for names in COLUMN_NAMES.values() for name in names}
    corner = split_unit(header[0])[0]
    may_be_of_two_kinds = corner in {"", "rtt", "node", "name", "host", *COLUMN_NAMES["src_addr"]}
    if not across & down and (not may_be_of_two_kinds or usual & {split_unit(name)[0] for name in across}):
        return False
    cells = [cell.strip() for row in rows for cell in row[1:]]
    cells = [cell for cell in cells if cell.lower() not in MISSING_TEXT | _UNMEASURED]
    values, _ = split_units(pc.replace_substring(pa.array(cells, pa.large_string()), ",", "."))
    return bool(len(cells)) and bool(np.mean(~np.isnan(values)) >= 0.9)


def _matrix(
    layout: Layout, header: list[str], rows: Sequence[Sequence[str]], options: InputOptions, what: str
) -> tuple[Layout, Understood]:
    triples = list(_triples(header, rows))
    corner = header[0] if split_unit(header[0])[1] else "cells"
    names = {"src_addr": "first column", "dst_addr": "first row", "rtt": corner}
    sample = {name: pa.array([one[i] for one in triples], pa.string()) for i, name in enumerate(names.values())}
    found = understand(
        list(sample), sample, replace(options, columns=names), what, optional=frozenset({"ip_version", "event_time"})
    )
    columns = {"src_addr": "src_addr", "dst_addr": "dst_addr", "rtt": "rtt"}
    return replace(layout, is_matrix=True), replace(found, columns=columns, said=f"a matrix: {found.said}")


def _triples(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[tuple[str, str, str]]:
    """Source, destination and RTT of each cell that was measured."""
    for row in rows:
        source = row[0].strip()
        for destination, cell in zip(header[1:], row[1:], strict=False):
            text = cell.strip()
            if destination != source and text.lower() not in _UNMEASURED and not text.startswith("-"):
                yield source, destination, text


def melted(table: pa.Table) -> pa.Table | None:
    """A matrix in the form of a data frame as a table with a row for each measurement; None if it is no matrix."""
    cells = [["" if cell is None else str(cell) for cell in column.to_pylist()] for column in table.columns]
    rows = list(zip(*cells, strict=True))
    if table.num_columns > table.num_rows * 100 + 1000 or not _is_matrix(table.column_names, rows):
        return None
    columns = zip(*_triples(table.column_names, rows), strict=True)
    return pa.table(dict(zip(("src_addr", "dst_addr", "rtt"), map(list, columns), strict=True)))


# Reading.


def read_csv(piece: Piece, batch_rows: int, strict: bool) -> Iterator[RawBatch]:
    layout: Layout = piece.layout
    if layout.is_matrix:
        yield from _read_matrix(piece, layout, batch_rows)
        return
    bad_lines: list[tuple[int, str]] = []  # since the last batch

    def on_bad_line(row: Any) -> str:
        bad_lines.append((row.number, f"{row.actual_columns} cells, not {row.expected_columns}"))
        return "error" if strict else "skip"

    def dropped() -> dict[str, Any]:
        counted = Counter(malformed_row=len(bad_lines))
        examples = {"malformed_row": "line {}: {}".format(*bad_lines[0])} if bad_lines else {}
        return {"dropped": counted, "examples": examples}

    date = piece.columns.get("event_time")
    chosen = [*piece.columns.values(), *([layout.time_of_day] if layout.time_of_day else [])]
    first_row = 0
    try:
        for batch in _batches(piece, layout, chosen, batch_rows, on_bad_line):
            if layout.time_of_day:
                joined = pc.binary_join_element_wise(batch[date], batch[layout.time_of_day], " ")
                batch = batch.set_column(batch.schema.get_field_index(date), date, joined)
            batch = batch.select(list(piece.columns.values())).rename_columns(list(piece.columns))
            yield RawBatch(batch=batch, first_row=first_row, **dropped())
            first_row += batch.num_rows + len(bad_lines)
            bad_lines.clear()
    except pa.ArrowInvalid:
        if strict and bad_lines:
            number, problem = bad_lines[0]
            raise MeasurementError(f"{piece.path}, line {number}: malformed_row ({problem})") from None
        raise
    if bad_lines:  # after the last good one
        empty = pa.RecordBatch.from_pylist([], schema=pa.schema([(name, pa.string()) for name in piece.columns]))
        yield RawBatch(batch=empty, first_row=first_row, **dropped())


def _batches(
    piece: Piece, layout: Layout, chosen: list[str], batch_rows: int, on_bad_line: Callable[[Any], str]
) -> Iterator[pa.RecordBatch]:
    """Every cell of these columns as text.

    Arrow lets go of `on_bad_line` in a thread of its own, a moment after its reader is gone. That thread needs Python:
    if Python exited meanwhile, the process would abort. So this waits for it.
    """
    references = sys.getrefcount(on_bad_line)
    reader = arrow_csv.open_csv(
        _squeezed(piece.path) if layout.delimiter == " " else open_text(piece.path),
        read_options=arrow_csv.ReadOptions(
            use_threads=False,
            block_size=max(1 << 16, batch_rows * _BYTES_PER_ROW),
            column_names=list(layout.names),
            skip_rows=layout.skipped,
        ),
        parse_options=arrow_csv.ParseOptions(
            delimiter="\t" if layout.delimiter == " " else layout.delimiter, invalid_row_handler=on_bad_line
        ),
        convert_options=arrow_csv.ConvertOptions(
            column_types={name: pa.string() for name in chosen}, include_columns=chosen, strings_can_be_null=False
        ),
    )
    try:
        with reader:
            yield from reader
    finally:
        del reader
        given_up = time.monotonic() + 1.0
        while sys.getrefcount(on_bad_line) > references and time.monotonic() < given_up:
            time.sleep(0.0005)


def _read_matrix(piece: Piece, layout: Layout, batch_rows: int) -> Iterator[RawBatch]:
    with open_text(piece.path) as stream:
        lines = io.TextIOWrapper(stream, "utf-8-sig", newline="")
        for _ in range(layout.skipped):
            next(lines)
        rows = (row for row in _cells(lines, layout.delimiter) if row)  # type: ignore[arg-type]
        triples: list[tuple[str, str, str]] = []
        first_row = 0
        for row in [*rows, None]:
            if row is not None:
                triples += _triples(layout.names, [row])
            if triples and (row is None or len(triples) >= batch_rows):
                columns = (pa.array(column, pa.string()) for column in zip(*triples, strict=True))
                yield RawBatch(batch=pa.record_batch(list(columns), list(piece.columns)), first_row=first_row)
                first_row += len(triples)
                triples = []


class _Squeezed(io.RawIOBase):
    """Lines of cells that blanks separate, with one tab between cells."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._kept = stream, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block, end = None, 0
        while block is None or (block and not end):
            block = self._stream.read(max(1, len(buffer) - len(self._kept)))
            text = self._kept + block
            end = text.rfind(b"\n") + 1 if block and len(text) < len(buffer) else len(text)
            self._kept = text[end:]
        squeezed = re.sub(rb"[ \t]+", b"\t", re.sub(rb"(?m)^[ \t]+|[ \t]+(?=\r?$)", b"", text[:end]))
        buffer[: len(squeezed)] = squeezed
        return len(squeezed)


def _squeezed(path: str) -> Any:
    return pa.PythonFile(io.BufferedReader(_Squeezed(open_text(path)), 1 << 20), mode="r")


def read_cells(path: str) -> tuple[list[str], list[list[str]]]:
    """A small text table with a header, whole."""
    with readable(path), open_text(path) as stream:
        lines = io.TextIOWrapper(stream, "utf-8-sig").read().splitlines()
    rows = [row for row in _cells(lines, _delimiter(lines[:200])) if any(row)] if lines else []
    if not rows:
        raise PingLlmError(f"{path} is empty")
    return [cell.strip() for cell in rows[0]], rows[1:]


def read_table(path: Path) -> pa.Table:
    """A table of questions as it is, with all its columns; nodes are text."""
    with explained(f"cannot read {path}", OSError, pa.ArrowException, csv.Error):
        if path.suffix == ".parquet":
            return pq.read_table(path)
        lines = _first_lines(str(path))
        if not any(lines):
            raise PingLlmError(f"cannot read {path}: it is empty")
        delimiter = _delimiter(lines[:200])
        ends = find_columns(next(_cells(lines, delimiter), []), {}, str(path), OPTIONAL_IN_QUESTIONS)
        kinds = {name: pa.string() for column, name in ends.items() if column in ("src_addr", "dst_addr")}
        return arrow_csv.read_csv(
            open_text(str(path)),
            parse_options=arrow_csv.ParseOptions(delimiter=delimiter),
            convert_options=arrow_csv.ConvertOptions(column_types=kinds),
        )
