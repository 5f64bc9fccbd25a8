"""Glob patterns over paths that are only known as text."""

import fnmatch
import re
from typing import Final

_MAGIC: Final = re.compile(r"[*?\[]")


def has_magic(text: str) -> bool:
    return bool(_MAGIC.search(text))


def split_pattern(path: str) -> tuple[str, str]:
    """The folders before the first one with a wildcard, and the rest."""
    parts = path.split("/")
    first = next((i for i, part in enumerate(parts) if has_magic(part)), len(parts))
    return "/".join(parts[:first]), "/".join(parts[first:])


def pattern_of(text: str) -> re.Pattern[str]:
    """A regular expression for relative paths. `**` stands for any number of folders; `*` does not cross a slash."""
    *folders, name = text.split("/")
    parts = ["(?:[^/]+/)*" if folder == "**" else _within_name(folder) + "/" for folder in folders]
    return re.compile("".join(parts) + ("(?:[^/]+/)*[^/]+" if name == "**" else _within_name(name)))


def _within_name(part: str) -> str:
    translated = fnmatch.translate(part)
    inner = translated[len("(?s:") : translated.rindex(")")]
    return inner.replace("(?>.*?", "(?>[^/]*?").replace(".*", "[^/]*")
