"""Predictions on the terminal: a table that fits its width, and a matrix as a heat map."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from rich.color import Color
from rich.console import Group
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ping_llm.cli.options import as_table
from ping_llm.core.console import out
from ping_llm.predict.matrix import MARKS, RAMP, Matrix
from ping_llm.sources.columns import question_columns

ROWS_SHOWN: Final = 25
_MATRIX_ROWS_SHOWN: Final = 60
_AS_WIDE_AS_NEEDED: Final = 1_000_000
_FOLDED_TO: Final = 20
"""Characters in a line of an address that is folded rather than leaving numbers out."""


def answers_table(answered: pa.Table, levels: Sequence[float], width: int | None = None) -> Iterator[str | Table]:
    """The first rows of a table of `Predictor.answered`, and the reasons of its extrapolations."""
    yield _fitting(answered.slice(0, ROWS_SHOWN).to_pylist(), answered, levels, width or out.width)
    if reasons := Counter(answered["reason"].drop_null().to_pylist()):
        yield "? extrapolated: " + "; ".join(f"{reason} ({count:,})" for reason, count in reasons.most_common())
    if answered.num_rows > ROWS_SHOWN:
        yield f"… and {answered.num_rows - ROWS_SHOWN:,} more: --output FILE saves all, --json prints all"


def _fitting(rows: list[dict[str, Any]], answered: pa.Table, levels: Sequence[float], width: int) -> Table:
    """Both nodes side by side; if that is too wide, one below the other, then without less important columns."""
    columns = question_columns(answered.column_names)
    ends = [columns["src_addr"], columns["dst_addr"]]
    longest = max((len(str(row[end])) for row in rows for end in ends), default=0)
    numbers = {"measured": "measured"} if any(row["measured"] is not None for row in rows) else {}
    numbers |= {"median" if level == 0.5 else f"{level * 100:.4g} %": f"{level:g}" for level in levels}
    few = {"median": "predictions"}
    table = Table()
    for shown, is_stacked, has_support in (
        (numbers, False, True),
        (numbers, True, True),
        (numbers, True, False),
        (few, True, False),
    ):
        cells = []
        for row in rows:
            both = [row[end] for end in ends]
            cells.append([*(["\n→".join(both)] if is_stacked else both), "?" if row["extrapolating"] else ""])
            values = [row[name] for name in shown.values()]
            cells[-1] += ["" if value is None else f"{value:.2f}" for value in values]
            cells[-1] += [f"{row['p_failed']:.1%}"] + [_support(row)] * has_support
        texts = ["source\n→destination"] if is_stacked else ["source", "destination"]
        names = [*shown, "timeout", *["rests on"] * has_support]
        table = as_table([*texts, ""], names, cells, "RTTs in ms; predictions are quantiles, given an answer")
        natural = out.measure(table, options=out.options.update(max_width=_AS_WIDE_AS_NEEDED)).maximum
        if natural - (0 if has_support else max(longest - _FOLDED_TO, 0)) <= width:
            break
    return table


def _support(row: dict[str, Any]) -> str:
    """What a prediction is based on, in few words."""
    if row["pair_measurements"]:
        return f"{row['pair_measurements']:,} of the pair"
    if row["chain"] is None:
        return "nothing" if row["distance_km"] is None else f"{row['distance_km']:,.0f} km"
    return f"{row['chain']} hops"


# A matrix.


def plain_matrix(matrix: Matrix) -> Segments:
    """Tab-separated values, for other programs."""
    lines = ["\t".join(["", *matrix.destinations])]
    for source, values, kinds in zip(matrix.sources, matrix.values.tolist(), matrix.kinds.tolist(), strict=True):
        cells = ("" if np.isnan(v) else f"{v:.2f}{MARKS[kind]}" for v, kind in zip(values, kinds, strict=True))
        lines.append("\t".join([source, *cells]))
    return Segments([Segment("".join(f"{line}\n" for line in lines))])


def heat_map(matrix: Matrix, width: int | None = None) -> Group:
    """Coloured cells, with RTTs in them if there is room. Nodes are numbered; the numbers are the columns' headings."""
    number = {node: index for index, node in enumerate(dict.fromkeys(matrix.sources + matrix.destinations), 1)}
    labels = [f"{number[node]:>{len(str(len(number)))}} {node}" for node in matrix.sources[:_MATRIX_ROWS_SHOWN]]
    room = (width or out.width) - max(map(len, labels)) - 1
    texts, kinds, colours = _numbers(matrix), matrix.kinds, matrix.colours()
    cell = 1 + max(len(str(len(number))), np.char.str_len(texts).max(initial=0))
    if cell * len(matrix.destinations) > room:
        texts, cell = np.where(texts == "", "", np.vectorize(MARKS.get)(kinds)), 2
    columns = min(len(matrix.destinations), max(room // cell, 1))
    heads = [str(number[node]) for node in matrix.destinations[:columns]]
    heads = [f"{head:>{cell - 1}} " if cell > 2 else f" {head[-1]}" for head in heads]
    indent = 1 + max(map(len, labels))
    lines = [Text(" " * indent + "".join(heads), "dim")]
    for row, label in enumerate(labels):
        line = Text(label.ljust(indent))
        for column in range(columns):
            measured = kinds[row, column] == "measured"
            line.append(f"{texts[row, column]:>{cell}}", _style(colours[row, column], is_bold=bool(measured)))
        lines.append(line)
    lines.append(Text())
    others = [f"{number[node]} {node}" for node in matrix.destinations[:columns] if node not in matrix.sources]
    if others:
        lines.append(Text("columns: " + ", ".join(others)))
    lines.append(_legend(matrix))
    if (len(labels), columns) < (len(matrix.sources), len(matrix.destinations)):
        all_of_it = f"{len(matrix.sources):,} × {len(matrix.destinations):,}"
        lines.append(Text(f"{len(labels)} × {columns} of {all_of_it}: --output matrix.html shows all"))
    return Group(*lines)


def _numbers(matrix: Matrix) -> Any:
    """RTTs with their marks, aligned."""
    marks = np.vectorize(lambda kind: MARKS[kind] or " ")(matrix.kinds)
    shown = np.vectorize(lambda v: "" if np.isnan(v) else f"{v:.1f}" if v < 9.95 else f"{v:.0f}")(matrix.values)
    return np.where(shown == "", "", np.char.add(shown, marks))


def _legend(matrix: Matrix) -> Text:
    low, high = matrix.scale
    legend = Text("ms:")
    for share in np.linspace(0, 1, 7):
        legend.append(" ").append(f" {low * (high / low) ** share:.3g} ", _style(share))
    return legend.append(f"   12 measured, 12{MARKS['predicted']} predicted, 12{MARKS['extrapolated']} extrapolated")


def _style(share: float, is_bold: bool = False) -> Style:
    """The style of a cell, from its position on the colour ramp (0 to 1)."""
    if np.isnan(share):
        return Style()
    stops = np.array([Color.parse(name).get_truecolor() for name in RAMP])
    red, green, blue = (float(np.interp(share, np.linspace(0, 1, len(RAMP)), channel)) for channel in stops.T)
    is_light = 0.3 * red + 0.59 * green + 0.11 * blue > 128
    return Style(bgcolor=Color.from_rgb(red, green, blue), color="#000000" if is_light else "#ffffff", bold=is_bold)
