"""`python -m ping_llm.config` prints the tables of all keys; with a page as argument it renews those in the page.

The tables are made from the declarations of the keys, so that they cannot say anything else.
"""

import sys
from pathlib import Path
from typing import Any, Final

from ping_llm.config.keys import SECTIONS, Rule
from ping_llm.core.errors import PingLlmError

BEGIN: Final = "<!-- keys: written by `python -m ping_llm.config docs/configuration.md` -->\n"
END: Final = "<!-- end of keys -->"

_TYPES: Final[dict[Any, str]] = {bool: "true/false", int: "integer", float: "number", str: "text"}


def key_tables() -> str:
    """Markdown: for each section a heading, an introduction and the table of its keys."""
    blocks = []
    for section in SECTIONS:
        lines = [f"### {section.__name__}\n\n{section.__doc__}\n\n| key | type | default | meaning |", "|---" * 4 + "|"]
        for name, field in section.model_fields.items():
            rules = (rule.text for rule in field.metadata if isinstance(rule, Rule))
            kind = ", ".join([_TYPES[field.annotation], *rules])
            default = str(field.default).lower() if field.annotation is bool else str(field.default)
            lines.append(f"| `{name}` | {kind} | {f'`{default}`' if default else 'empty'} | {field.description} |")
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def updated(page: str) -> str:
    """The page with what stands between the markers replaced by the tables."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise PingLlmError(f"the page has no markers for the keys: {BEGIN.strip()} … {END}")
    return f"{before}{BEGIN}\n{key_tables()}\n{END}{after}"


def main(pages: list[str]) -> int:
    try:
        for page in map(Path, pages):
            page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
    except (OSError, PingLlmError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if not pages:
        sys.stdout.write(key_tables())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
