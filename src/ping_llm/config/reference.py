"""The documentation of the keys, made from their declarations, so that it cannot say anything else."""

from pathlib import Path
from typing import Final

from ping_llm.config.keys import KeyInfo
from ping_llm.config.sections import Config
from ping_llm.errors import PingLlmError

BEGIN: Final = "<!-- keys: written by `python -m ping_llm.config docs/configuration.md` -->\n"
END: Final = "<!-- end of keys -->"

_TYPES: Final[dict[type, str]] = {bool: "true/false", int: "integer", float: "number", str: "text"}


def key_tables() -> str:
    """Markdown: for each section a heading, an introduction and the table of its keys."""
    blocks = []
    for section in Config.sections():
        introduction = (section.__doc__ or "").split("\n\n")[0]
        rows = "\n".join(_row(info) for info in section.describe())
        blocks.append(
            f"### {section.title}\n\n{introduction}\n\n| key | type | default | meaning |\n|---|---|---|---|\n{rows}\n"
        )
    return "\n".join(blocks)


def _row(info: KeyInfo) -> str:
    default = str(info.default).lower() if info.kind is bool else str(info.default)
    shown_default = f"`{default}`" if default else "empty"
    allowed = f", {info.rule.text}" if info.rule else ""
    return f"| `{info.name}` | {_TYPES[info.kind]}{allowed} | {shown_default} | {info.help} |"


def updated(page: str) -> str:
    """The page with what stands between the markers replaced by the tables."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise PingLlmError(f"the page has no place for the keys: {BEGIN.strip()} … {END}")
    return f"{before}{BEGIN}\n{key_tables()}\n{END}{after}"


def update(path: Path) -> None:
    path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
