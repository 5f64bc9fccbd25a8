"""Pages of one file: templates filled with values, with style and scripts in them, which ask for no other file.

Jinja escapes every text that it is given, and a content security policy allows just the scripts of this package, by
their hashes: text that got through the escaping would not run either.
"""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ping_llm import __version__


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
    }
    return environment().get_template(template).render(values | assets)


@cache
def _file(name: str) -> Markup:
    return Markup((Path(__file__).parent / "static" / name).read_text(encoding="utf-8"))
