"""From a YAML file and `key=value` overrides to a `Config`.

The file is read as a tree of nodes and not as Python values: nodes know their line, show duplicate keys, and keep the
text of a value, so that the type of its key decides what it means, in a file as in an override. YAML's own guesses
(`1e6` is text, `no` is false, `010` is eight) never come into play.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from ping_llm.config.keys import KeyInfo, Value, shown
from ping_llm.config.sections import Config, find_key
from ping_llm.core.errors import PingLlmError

BASE: Final = "base_config"
"""In a file: the file to start from. Not a key of `Config`, which holds the outcome."""

_TAG: Final = "tag:yaml.org,2002:"
_SCALAR_TAGS: Final = {_TAG + name for name in ("str", "int", "float", "bool", "timestamp")}


@dataclass(frozen=True)
class _Setting:
    """A key and the text of its value, with where it was written, for messages."""

    origin: str
    name: str
    text: str

    def value(self) -> Value:
        try:
            return find_key(self.name).parsed(self.text)
        except PingLlmError as error:
            raise PingLlmError(f"{self.origin}: {error}") from None


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a file (None: all defaults), changed by overrides, of which the last one of a key holds.

    Every setting is checked, also one that a later one replaces.

    >>> load_config(None, ["max_target_length=512"]).max_target_length
    512
    """
    settings = [] if path is None else _read(Path(path))
    settings += [_override(text) for text in overrides]
    values = {setting.name: setting.value() for setting in settings}
    return Config(**values)  # type: ignore[arg-type]  # each value was checked against its key


def _override(text: str) -> _Setting:
    origin = f"override {shown(text)}"
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise PingLlmError(f"{origin}: write key=value")
    if name.strip() == BASE:
        raise PingLlmError(f"{origin}: {BASE} belongs in a configuration file; load the other file instead")
    return _Setting(origin, name.strip(), value)


def _read(path: Path, derived: tuple[Path, ...] = (), origin: str = "") -> list[_Setting]:
    """The settings of a file after those of its base. `derived` are the files based on it, `origin` says where."""
    entries = list(_entries(path, origin))  # before the path is looked at further: this reports what is wrong with it
    if path.resolve() in [file.resolve() for file in derived]:
        chain = " -> ".join(str(file) for file in (*derived, path))
        raise PingLlmError(f"{origin}{BASE} leads in a circle: {chain}")
    base: list[_Setting] = []
    own: list[_Setting] = []
    for setting in entries:
        if setting.name == BASE:
            base = _read(path.parent / setting.text, (*derived, path), f"{setting.origin}: ")
        else:
            own.append(setting)
    return base + own


def _entries(path: Path, asked: str) -> Iterator[_Setting]:
    root = _parse(path, asked)
    if root is None or root.tag == _TAG + "null":  # nothing but comments, or `---` alone
        return
    if not isinstance(root, yaml.MappingNode):
        raise PingLlmError(f"{path}: not a configuration; it must hold lines of the form key: value")
    lines: dict[str, int] = {}
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        origin = f"{path} line {line}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise PingLlmError(f"{origin}: a key must be a plain word")
        name = key_node.value
        if name in lines:
            raise PingLlmError(f"{origin}: {shown(name)} is set twice, first on line {lines[name]}")
        lines[name] = line
        yield _Setting(origin, name, _text(value_node, name, origin))


def _text(node: yaml.Node, name: str, origin: str) -> str:
    if isinstance(node, yaml.MappingNode):
        raise PingLlmError(f"{origin}: {shown(name)} holds further keys; all keys stand at the top level")
    if isinstance(node, yaml.SequenceNode):
        raise PingLlmError(f"{origin}: {shown(name)} holds a list; every key has one value")
    if node.tag == _TAG + "null":
        raise PingLlmError(f'{origin}: {shown(name)} has no value; write "" for empty text, or remove the line')
    if node.tag not in _SCALAR_TAGS:
        raise PingLlmError(f"{origin}: {shown(name)} has the tag {shown(node.tag)}; write the plain value")
    return str(node.value)


def _parse(path: Path, asked: str) -> yaml.Node | None:
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a character that no file name may hold
        reason = getattr(error, "strerror", error)
        raise PingLlmError(f"{asked}cannot read the configuration {shown(str(path))}: {reason}") from None
    try:
        return yaml.compose(data, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise PingLlmError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        # Wrong encoding, an escape like "\\UFFFFFFFF", a thousand brackets: the message may have several lines.
        raise PingLlmError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


# The documentation of the keys, made from their declarations, so that it cannot say anything else.

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
