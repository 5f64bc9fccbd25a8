"""What a text table is: where its cells are and what its columns mean, from its first lines.

CSV of any delimiter, with a header or without, long (one measurement in a line) or a matrix. In a matrix, the first row
and the first column name the nodes (without names they are numbered from 1); `*` is a timeout, and a cell that is
empty, 0 or negative was not measured.
"""

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ping_llm.core.cells import DATE, MISSING_TEXT, TIMEOUT_TEXT, split_units
from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import UNPARSABLE, parse_addresses, parse_nodes
from ping_llm.sources.columns import (
    COLUMN_NAMES,
    InputOptions,
    Understood,
    are_columns,
    find_columns,
    split_unit,
    understand,
    words,
)

_DELIMITERS: Final = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars", " ": "spaces"}
_UNMEASURED: Final = MISSING_TEXT - TIMEOUT_TEXT | {"nan"}
_SUMMARIES: Final = frozenset(words("average avg mean median min max total"))
"""Rows and columns beside the nodes of a matrix."""
_DESCRIPTIONS: Final = frozenset(words("altitude elevation distance asn id index count loss"))
_COORDINATES: Final = (words("lat latitude"), words("lon longitude lng long"))
"""Columns about the nodes of a matrix, unless a row has the name, too; coordinates only both: LON may be London."""
_TIME_OF_DAY: Final = re.compile(r"^\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?\s*([AaPp][Mm])?$")
_NUMBER: Final = re.compile(r"^\s*[-+]?\d[\d.,/]*(e[-+]?\d+)?\s*[a-zµ]{0,2}\s*$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the cells of a text table are."""

    delimiter: str
    names: tuple[str, ...]
    """Of the columns; without a header they are numbers, from 1."""
    skipped: int
    """Lines before the first row."""
    encoding: str = "utf-8"
    time_of_day: str | None = None
    """The column that completes that of the date."""
    is_matrix: bool = False
    row_names: int | None = None
    """The column that names the nodes in the rows of a matrix; None: they are numbered."""
    nodes: tuple[int, ...] = ()
    """The columns of a matrix that are nodes."""


def look_at(
    lines: Sequence[str], options: InputOptions, what: str, optional: frozenset[str]
) -> tuple[Layout, Understood]:
    """The layout of a table that begins with these lines, and what its columns are."""
    first = _next_line(lines, 0)
    if first is None:
        raise PingLlmError(f"{what}: the first line must name the columns")
    if stated := re.match(r"^sep=(.)\s*$", lines[first]):  # as Excel writes it
        first, options = first + 1, replace(options, delimiter=options.delimiter or stated[1])
    delimiter = options.delimiter or find_delimiter(lines[first : first + 200])
    rows = _rows(lines[first:], delimiter)
    if not rows:
        raise PingLlmError(f"{what}: there is no row")
    width = _usual([len(row) for row in rows[1:] or rows])
    while width > 2 and len(rows[0]) == 1 and (second := _next_line(lines, first + 1)):
        rows, first = rows[1:], second  # a title, or how many nodes there are
    if first and lines[first - 1].startswith("#") and _is_data(rows[0]):  # a header that is a comment
        named = next(iter(cells_of([lines[first - 1].lstrip("# ")], delimiter)))
        if len(named) == len(rows[0]) and are_columns(named, options.columns, optional):
            rows, first = [named, *rows], first - 1
    header, body = _header_and_rows(rows, width)
    layout, no_header = Layout(delimiter=delimiter, names=_unique(header), skipped=first + 1), ""
    if not are_columns(layout.names, options.columns, optional):
        if nodes := _nodes_of(header, body):
            return _matrix(layout, nodes, body, options, what)
        if not _is_data(header):
            find_columns(layout.names, options.columns, what, optional)  # says what is missing
        layout = replace(layout, names=tuple(str(i + 1) for i in range(width)), skipped=first)
        if not options.columns and _is_bare_matrix(rows):
            return _matrix(layout, (None, tuple(range(width))), rows, options, what)
        body = [row for row in rows if len(row) == width]
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


def _next_line(lines: Sequence[str], start: int) -> int | None:
    """The number of the first line that is neither empty nor a comment."""
    return next((i for i in range(start, len(lines)) if lines[i].strip() and not lines[i].startswith("#")), None)


def _rows(lines: Sequence[str], delimiter: str) -> list[list[str]]:
    return [row for row in cells_of([line for line in lines if not line.startswith("#")], delimiter) if row]


def cells_of(lines: Iterator[str] | Sequence[str], delimiter: str) -> Iterator[list[str]]:
    if delimiter == " ":
        return (line.split() for line in lines)
    return csv.reader(lines, delimiter=delimiter)


def find_delimiter(lines: Sequence[str]) -> str:
    """The one that cuts most lines into equally many cells; blanks only if nothing else does."""
    scores = {}
    for delimiter in _DELIMITERS:
        counts = [len(row) for row in cells_of(lines, delimiter) if row]
        width = _usual(counts) if counts else 1
        scores[delimiter] = min(width, 4) * counts.count(width) / max(1, len(counts)) if width > 1 else 0.0
    blanks = scores.pop(" ")
    best = max(scores, key=lambda one: scores[one])
    return " " if scores[best] < 2.4 and blanks > scores[best] else best


def _header_and_rows(rows: Sequence[list[str]], width: int) -> tuple[list[str], list[list[str]]]:
    """With as many cells in each, whichever of them has too few."""
    header, body = [cell.strip() for cell in rows[0]], [row for row in rows[1:] if len(row) == width]
    missing = [""] * (width - len(header))
    # A delimiter may end each row, or rows begin with names of their own.
    header = [*missing, *header] if any(row[-1] for row in body) else [*header, *missing]
    return header, [[*row, *[""] * (len(header) - width)] for row in body]  # the reader will say they are malformed


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


def _numbers(cells: Sequence[str]) -> Any:
    """The numbers in cells, with a decimal comma or point and perhaps a unit; NaN where there is none."""
    return split_units(pc.replace_substring(pa.array(cells, pa.large_string()), ",", "."))[0]


# Without a header.


def _is_data(cells: Sequence[str]) -> bool:
    """Whether a row holds a number, a time or an address, as no header does."""
    families, _ = parse_addresses([cell.strip() for cell in cells])
    return bool((families != UNPARSABLE).any()) or any(_NUMBER.match(cell) or re.match(DATE, cell) for cell in cells)


def _by_type(
    names: Sequence[str], rows: Sequence[Sequence[str]], given: Mapping[str, str], what: str
) -> dict[str, str]:
    """Which column of a table without a header is what: as it is given, else from the cells."""
    kinds: dict[str, list[str]] = {kind: [] for kind in ("time", "clock", "address", "number", "version", "name")}
    sample = {name: [cell.strip() for cell in column.to_pylist()] for name, column in _sample(names, rows).items()}
    for name, cells in sample.items():
        if name not in given.values():
            kinds[_kind(cells)].append(name)
    numbers = kinds["number"]
    nodes = sorted(kinds["address"] if len(kinds["address"]) >= 2 else kinds["address"] + kinds["name"], key=int)
    ends = [end for end in ("src_addr", "dst_addr") if end not in given]
    if len(ends) == 2 and not nodes and (nodes := _numbered_nodes({name: sample[name] for name in numbers})):
        numbers = [name for name in numbers if name not in nodes]
        if not kinds["time"] and "event_time" not in given and len(numbers) == 2:  # seconds since the beginning
            kinds["time"] = [name for name in numbers if _goes_on(sample[name])][:1]
        numbers = [name for name in numbers if name not in kinds["time"]]
    if len(numbers) > 1:  # whole numbers are counts and sizes, if others are not
        split = [name for name in numbers if any(re.search(r"[.,]\d|[a-z]", cell) for cell in sample[name])]
        numbers = split if len(split) == 1 else numbers
    if len(numbers) == 3 and np.diff([_numbers(sample[name]) for name in numbers], axis=0).min() >= 0:
        numbers = numbers[1:2]  # least, mean and largest
    found = dict(given)
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


def _numbered_nodes(numbers: Mapping[str, Sequence[str]]) -> list[str]:
    """The two columns, one after the other, whose whole numbers are those of the same nodes; none if others are, too.

    Most nodes that are in one of them are in the other, too, as they are not in columns of ports or of packet sizes.
    """
    values = {name: set(cells) for name, cells in numbers.items() if all(map(str.isdecimal, cells))}
    pairs = [
        [one, other]
        for one, other in pairwise(numbers)
        if one in values and other in values and min(len(values[one]), len(values[other])) > 1
        if 2 * len(values[one] & values[other]) >= min(len(values[one]), len(values[other]))
    ]
    return pairs[0] if len(pairs) == 1 else []


def _goes_on(cells: Sequence[str]) -> bool:
    """Whether numbers never become smaller, and are many different ones."""
    values = _numbers(cells)
    return bool((np.diff(values) >= 0).all()) and len(np.unique(values)) > max(1, len(values) // 10)


def _kind(cells: Sequence[str]) -> str:
    cells = [cell for cell in cells if cell.lower() not in MISSING_TEXT] or [""]

    def mostly(flags: Any) -> bool:
        return bool(np.mean(np.asarray(flags, dtype=bool)) >= 0.8)

    values = _numbers(cells)
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


Nodes = tuple[int | None, tuple[int, ...]]
"""Of a matrix, the column that names the nodes in its rows, and the columns that are nodes."""


def _nodes_of(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Nodes | None:
    """Where a row and a column name nodes, and all other cells are RTTs; None where that is not so."""
    if len(header) < 2 or not rows:
        return None
    own = 0
    if (
        len(header) > 2 and header[0].lower() in _OF_INDEX and _counts([row[0] for row in rows])
    ):  # as data frames number their rows
        own = 0 if _kind([row[1].strip() for row in rows]) == "number" else 1
    down = [row[own].strip() for row in rows]
    lower = [name.lower() for name in header]
    about = {*lower} - {name.lower() for name in down}
    places = [about.intersection(some) for some in _COORDINATES]
    others = (about & _DESCRIPTIONS).union(*(places if all(places) else ()))
    nodes = [i for i, name in enumerate(lower) if i > own and name and name not in _SUMMARIES | others]
    if {header[i] for i in nodes} & set(down):  # there may be texts about the nodes, too
        nodes = [i for i in nodes if header[i] in down or _are_rtts([row[i] for row in rows], 0.0)]
    names = [header[i] for i in nodes], [name for name in down if name]
    across, below = map(set, names)
    families, _, _ = parse_nodes(sorted(across | below))
    if not nodes or (families == UNPARSABLE).any() or len(across) < len(nodes):
        return None
    are_numbers = [not np.isnan(_numbers(some)).any() for some in names]
    if all(are_numbers) and (_NUMBER.match(header[own]) or not all(map(_goes_on, names))):
        return None  # numbers are names only in a row of names, and in order
    if (any(are_numbers) and not all(are_numbers) and not header[own]) or _kind(down) in ("time", "clock"):
        return None  # rows by number or by time
    usual = {name for names in COLUMN_NAMES.values() for name in names}
    corner = split_unit(header[own])[0]
    may_be_of_two_kinds = corner in {"", "rtt", "node", "name", "host", *COLUMN_NAMES["src_addr"]}
    if not across & below and (not may_be_of_two_kinds or usual & {split_unit(name)[0] for name in across}):
        return None
    cells = [row[i] for row in rows for i in nodes if header[i] != row[own] and i < len(row)]
    return (own, tuple(nodes)) if _are_rtts(cells) else None


_OF_INDEX: Final = ("", "unnamed: 0", "index", "id", "#")


def _counts(cells: Sequence[str]) -> bool:
    first = cells[0].strip()
    return first in ("0", "1") and [cell.strip() for cell in cells] == [str(int(first) + i) for i in range(len(cells))]


def _is_bare_matrix(rows: Sequence[Sequence[str]]) -> bool:
    """Whether all cells are RTTs, with none on the diagonal."""
    width = len(rows[0])
    if not 3 <= len(rows) <= width or any(len(row) != width for row in rows):
        return False
    return not any(_is_measured(rows[i][i].strip()) for i in range(len(rows))) and _are_rtts(
        [cell for row in rows for cell in row]
    )


def _are_rtts(cells: Sequence[str], share: float = 0.9) -> bool:
    """Whether at least this share of cells that are not empty are numbers, and at least one is if there are any."""
    cells = [cell for cell in map(str.strip, cells) if cell.lower() not in MISSING_TEXT | _UNMEASURED]
    if not cells:
        return share == 0
    numbers = np.mean(~np.isnan(_numbers(cells)))
    return bool(numbers > 0 and numbers >= share)


def _matrix(
    layout: Layout, nodes: Nodes, rows: Sequence[Sequence[str]], options: InputOptions, what: str
) -> tuple[Layout, Understood]:
    layout = replace(layout, is_matrix=True, row_names=nodes[0], nodes=nodes[1])
    corner = "" if nodes[0] is None else layout.names[nodes[0]]
    names = {"src_addr": "first column", "dst_addr": "first row", "rtt": corner if split_unit(corner)[1] else "cells"}
    measured = list(triples(layout, rows))
    if not measured:
        raise PingLlmError(f"{what}: a matrix in which nothing was measured")
    sample = {name: pa.array([one[i] for one in measured], pa.string()) for i, name in enumerate(names.values())}
    found = understand(
        list(sample), sample, replace(options, columns=names), what, optional=frozenset({"ip_version", "event_time"})
    )
    said = found.said if layout.row_names is not None else f"nodes by number, RTT{found.said.partition('RTT')[2]}"
    return layout, replace(found, columns={name: name for name in names}, said=f"a matrix: {said}")


def triples(layout: Layout, rows: Iterable[Sequence[str]]) -> Iterator[tuple[str, str, str]]:
    """Source, destination and RTT of each cell that was measured."""
    own = layout.row_names
    names = [(i, layout.names[i]) for i in layout.nodes]
    for number, row in enumerate(rows, 1):
        source = str(number) if own is None else row[own].strip()
        if not source or source.lower() in _SUMMARIES:
            continue
        for i, destination in names:
            if destination != source and i < len(row) and _is_measured(cell := row[i].strip()):
                yield source, destination, cell


_NOTHING: Final = re.compile(r"-.*|0+([.,]0*)?(e[-+]?\d+)?", re.IGNORECASE)


def _is_measured(cell: str) -> bool:
    return cell.lower() not in _UNMEASURED and not _NOTHING.fullmatch(cell)


def melted(table: pa.Table) -> pa.Table | None:
    """A matrix in the form of a data frame as a table with a row for each measurement; None if it is no matrix."""
    cells = [["" if cell is None else str(cell) for cell in column.to_pylist()] for column in table.columns]
    rows = list(zip(*cells, strict=True))
    nodes = None
    if table.num_columns <= table.num_rows * 100 + 1000:
        nodes = _nodes_of(table.column_names, rows)
    if nodes is None:
        return None
    layout = Layout(delimiter=",", names=tuple(table.column_names), skipped=0, row_names=nodes[0], nodes=nodes[1])
    columns = zip(*triples(layout, rows), strict=True)
    return pa.table(dict(zip(("src_addr", "dst_addr", "rtt"), map(list, columns), strict=False)))
