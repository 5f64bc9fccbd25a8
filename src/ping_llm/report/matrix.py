"""A matrix of RTTs as one self-contained HTML file: a heat map, and all that is known of a pair under the pointer."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ping_llm.core.files import write_atomically
from ping_llm.core.rtt import Floats
from ping_llm.predict.matrix import RAMP, Matrix
from ping_llm.report.rendering import rendered

_DIGITS = 4


def write_matrix(matrix: Matrix, levels: Sequence[float], output: Path) -> None:
    names = "measured", "predicted", "low", "high", "p_failed"
    data: dict[str, Any] = {name: _numbers(getattr(matrix, name)) for name in names}
    data |= {"extrapolating": matrix.extrapolating.astype(int).ravel().tolist(), "scale": matrix.scale, "ramp": RAMP}
    data |= {"sources": matrix.sources, "destinations": matrix.destinations, "levels": [min(levels), max(levels)]}
    counts = {kind: int(((matrix.kinds == kind) & ~np.isnan(matrix.values)).sum()) for kind in np.unique(matrix.kinds)}
    values = {"data": data, "counts": counts, "now": datetime.now(UTC)}
    page = rendered("matrix.html", ("style.css", "matrix.css"), ("matrix.js",), values)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page.encode("utf-8", "replace"))


def _numbers(values: Floats) -> list[float | None]:
    """Row by row, in four digits: a page of a million pairs is some 30 MB."""
    return [None if value != value else float(f"{value:.{_DIGITS}g}") for value in values.ravel().tolist()]
