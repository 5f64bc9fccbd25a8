"""Loading a `Config` from a YAML file and `key=value` overrides.

The file is read as a tree of YAML nodes instead of Python values: nodes have line numbers, show duplicate keys and keep
the text of a value, so that the type of its key decides what it means, in a file as in an override. YAML's own guesses
(`1e6` is text, `no` is false, `010` is eight) play no part.
"""

from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from ping_llm.config.keys import KEYS, MAX_DIGITS, SECTIONS, Config
from ping_llm.config.maxtext import MAXTEXT_KEYS
from ping_llm.core.errors import PingLlmError, explained, one_line, shown

BASE: Final = "base_config"
"""In a file, the name of another file whose settings come first. It is not a key of `Config`."""

_BOOLEANS: Final = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)
_TAG: Final = "tag:yaml.org,2002:"
_SCALAR_TAGS: Final = {_TAG + name for name in ("str", "int", "float", "bool", "timestamp")}


class _Setting(NamedTuple):
    """A key, the text of its value, and its origin (a line of a file, or an override) for error messages."""

    origin: str
    name: str
    text: str

    def value(self) -> Any:
        kind = KEYS[self.name].annotation if self.name in KEYS else str
        with explained(self.origin, PingLlmError, limit=1000):
            return check_value(self.name, _parsed(kind, self.text))

    def is_redundant(self) -> bool:
        """Whether it is a key that only MaxText has, with a value that changes nothing here; an error if it would
        change something."""
        if self.name not in MAXTEXT_KEYS:
            return False
        same, instead = MAXTEXT_KEYS[self.name]
        if same is None or _parsed(type(same), self.text) != same:
            raise PingLlmError(f"{self.origin}: {self.name} is a key of MaxText only: {instead}; remove it")
        return True


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a file (None: all defaults), changed by overrides. The last override of a key wins.

    Every setting is checked, also those that a later one replaces.

    >>> load_config(None, ["max_target_length=512"]).max_target_length
    512
    """
    settings = [] if path is None else _read(Path(path))
    for text in overrides:
        origin = f"override {shown(text)}"
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise PingLlmError(f"{origin}: write key=value")
        if name.strip() == BASE:
            raise PingLlmError(f"{origin}: {BASE} belongs in a configuration file; load the other file instead")
        settings.append(_Setting(origin, name.strip(), value))
    return Config(**{setting.name: setting.value() for setting in settings if not setting.is_redundant()})


def check_value(name: str, value: Any) -> Any:
    """The checked value of one key, with integers converted where the key is a float; an error if there is no such key,
    or if it may not have that value."""
    section = next((section for section in SECTIONS if name in section.model_fields), Config)
    return getattr(section(**{name: value}), name)


def _read(path: Path, derived: tuple[Path, ...] = (), origin: str = "") -> list[_Setting]:
    """The settings of a file, after those of its base. `derived`: the files based on this one; `origin`: where it is
    named, for error messages."""
    entries = list(_entries(path, origin))  # first, because it reports what is wrong with the path
    if path.resolve() in [file.resolve() for file in derived]:
        chain = " -> ".join(str(file) for file in (*derived, path))
        raise PingLlmError(f"{origin}{BASE} leads in a circle: {chain}")
    own = [setting for setting in entries if setting.name != BASE]
    for setting in entries:
        if setting.name == BASE:
            return _read(path.parent / setting.text, (*derived, path), f"{setting.origin}: ") + own
    return own


def _entries(path: Path, origin: str) -> Iterator[_Setting]:
    with explained(f"{origin}cannot read the configuration {shown(str(path))}", OSError, ValueError):
        data = path.read_bytes()  # ValueError: a character that no file name may hold
    try:
        root = yaml.compose(data, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise PingLlmError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        # Wrong encoding, an escape like "\\UFFFFFFFF", a thousand brackets: the message may have several lines.
        raise PingLlmError(f"{path}: not valid YAML: {one_line(error)}") from None
    if root is None or root.tag == _TAG + "null":  # nothing but comments, or `---` alone
        return
    if not isinstance(root, yaml.MappingNode):
        raise PingLlmError(f"{path}: not a configuration; it must hold lines of the form key: value")
    lines: dict[str, int] = {}
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        where = f"{path} line {line}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise PingLlmError(f"{where}: a key must be a plain word")
        name = key_node.value
        if name in lines:
            raise PingLlmError(f"{where}: {shown(name)} is set twice, first on line {lines[name]}")
        lines[name] = line
        if problem := _not_plain(value_node):
            raise PingLlmError(f"{where}: {shown(name)} {problem}")
        yield _Setting(where, name, str(value_node.value))


def _not_plain(node: yaml.Node) -> str | None:
    """Why a node is not a plain value, or None if it is one."""
    if isinstance(node, yaml.MappingNode):
        return "holds further keys; all keys stand at the top level"
    if isinstance(node, yaml.SequenceNode):
        return "holds a list; every key has one value"
    if node.tag == _TAG + "null":
        return 'has no value; write "" for empty text, or remove the line'
    return None if node.tag in _SCALAR_TAGS else f"has the tag {shown(node.tag)}; write the plain value"


def _parsed(kind: Any, text: str) -> Any:
    """The text as a value of this type, or the text itself if it is not one. The type is that of the key, so
    `run_name=007` stays `007`."""
    try:
        if kind is bool:
            return _BOOLEANS.get(text.strip().lower(), text)
        if kind is float:
            return float(text)
        if kind is int:  # `1000`, `1_000` and `1e3` alike; nothing is rounded
            number = Decimal(text)
            if number.is_finite() and number == number.to_integral_value():
                # `1e999999999` would be a gigabyte of digits; any number that is too long gets the same error.
                return int(number) if number.adjusted() < MAX_DIGITS else 10**MAX_DIGITS
    except (InvalidOperation, ValueError):
        pass
    return text
