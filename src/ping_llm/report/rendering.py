"""Self-contained HTML files: templates filled with values, with styles and scripts inside.

Jinja escapes all text, and a content security policy allows only the scripts of this package, by their hashes: text
that got past the escaping would not run either.
"""

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ping_llm import __version__
from ping_llm.core.files import write_atomically
from ping_llm.core.rtt import Floats
from ping_llm.predict.matrix import RAMP, Matrix


@cache
def environment() -> Environment:
    found = Environment(
        loader=PackageLoader("ping_llm.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    found.filters["thousands"] = "{:,}".format
    found.globals["version"] = __version__
    return found


def rendered(template: str, styles: Sequence[str], scripts: Sequence[str], values: dict[str, Any]) -> str:
    texts = [_file(name) for name in scripts]
    assets = {
        "style": Markup("").join(_file(name) for name in styles),
        "scripts": texts,
        "hashes": [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts],
        "now": datetime.now(UTC),
    }
    return environment().get_template(template).render(values | assets)


@cache
def _file(name: str) -> Markup:
    return Markup((Path(__file__).parent / "static" / name).read_text(encoding="utf-8"))


def write_page(page: str, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page.encode("utf-8", "replace"))  # JSON can contain half of a surrogate pair


def write_matrix(matrix: Matrix, levels: Sequence[float], output: Path) -> None:
    """A matrix of RTTs as a page: a heat map, and all that is known about the pair under the pointer."""
    names = "measured", "predicted", "low", "high", "p_failed"
    data: dict[str, Any] = {name: _four_digits(getattr(matrix, name)) for name in names}
    data |= {"extrapolating": matrix.extrapolating.astype(int).ravel().tolist(), "scale": matrix.scale, "ramp": RAMP}
    data |= {"sources": matrix.sources, "destinations": matrix.destinations, "levels": [min(levels), max(levels)]}
    counts = {kind: int(((matrix.kinds == kind) & ~np.isnan(matrix.values)).sum()) for kind in np.unique(matrix.kinds)}
    scripts = "colours.js", "matrix.js"
    write_page(rendered("matrix.html", ("style.css", "matrix.css"), scripts, {"data": data, "counts": counts}), output)


def _four_digits(values: Floats) -> list[float | None]:
    """Row by row, rounded: a page of a million pairs is some 30 MB."""
    return [None if value != value else float(f"{value:.4g}") for value in values.ravel().tolist()]
