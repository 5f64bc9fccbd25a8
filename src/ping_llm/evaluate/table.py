"""Scores as a table for people."""

from collections.abc import Mapping

from rich import box
from rich.table import Table

_COLUMNS = {
    "median_re": ("median RE", "{:.1%}"),
    "p90_re": ("p90 RE", "{:.1%}"),
    "median_ae": ("median AE", "{:.2f} ms"),
    "mae": ("MAE", "{:.1f} ms"),
    "nll_bits": ("NLL", "{:.2f} bit"),
    "coverage90": ("in 90 %", "{:.1%}"),
}
_LEGEND = (
    "RE, AE: relative and absolute error of the predicted median; p90: of ten errors, one is larger; MAE: mean AE;\n"
    "NLL: surprise of a result, failures included; in 90 %: share of RTTs inside the predicted 90 % interval"
)


def comparison(title: str, scores: Mapping[str, Mapping[str, float]]) -> Table:
    """A line for each predictor; what it does not give stays empty."""
    table = Table(
        title=title,
        title_justify="left",
        caption=_LEGEND,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
    )
    table.add_column("predictor", no_wrap=True)
    for header, _ in _COLUMNS.values():
        table.add_column(header, justify="right", no_wrap=True)
    for name, values in scores.items():
        cells = [form.format(values[key]) if key in values else "" for key, (_, form) in _COLUMNS.items()]
        style = "bold" if name == "model" else "dim" if name == "oracle" else ""
        table.add_row("the truth" if name == "oracle" else name, *cells, style=style)
    return table
