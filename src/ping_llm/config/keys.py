"""The kinds of data there are: those that come with the package, and those that other packages add."""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Final, Self, TypeVar, cast

from ping_llm.core.errors import PingLlmError

DATASET_TYPES: Final = {
    "network": "network",
    "grain": "grain",
    "hf": "hf",
    "tfds": "tfds",
    "c4_mlperf": "tfds",
    "synthetic": "synthetic",
    "worlds": "completer",
    "measured": "completer",
}
"""Those that come with the package, and the module of `ping_llm.data` that serves each."""

TEXT: Final = ("grain", "hf", "tfds", "c4_mlperf")
"""Those of them that need a tokenizer."""

GROUP: Final = "ping_llm.backends"
"""Entry points of this group are backends; docs/backends.md says what they must offer."""


@cache
def added() -> dict[str, EntryPoint]:
    """The backends of other packages, by the name that `dataset_type` calls them."""
    return {entry.name: entry for entry in entry_points(group=GROUP) if entry.name not in DATASET_TYPES}


def is_dataset_type(name: str) -> bool:
    return name in DATASET_TYPES or name in added()


# What a key is: a type, a default, one line of help and a rule, kept as data beside the field that declares it.
#
# A value is checked by `KeyInfo.checked` wherever it comes from: a file, an override, or Python.

Value = bool | int | float | str
T = TypeVar("T", bool, int, float, str)

_TYPE_NAMES: Final[dict[type, str]] = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_BOOLEANS: Final = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MOST_DIGITS: Final = 18
"""Of an integer, so that it fits 64 bits wherever it goes."""


@dataclass(frozen=True)
class Rule:
    """What a value must be. `text` completes the sentence "must be …"; `accepts` may raise an error that says more."""

    text: str
    accepts: Callable[[Any], bool]


def at_least(least: float, *, up_to: float = math.inf, or_else: float | None = None) -> Rule:
    """`or_else` is the one value outside the range that has a meaning (-1, most often). The help says which."""
    text = f"at least {least}" if up_to == math.inf else f"from {least} to {up_to}"
    return _range(text, lambda value: least <= value <= up_to, or_else)


def above(bound: float, *, or_else: float | None = None) -> Rule:
    return _range(f"above {bound}", lambda value: value > bound, or_else)


def _range(text: str, inside: Callable[[float], bool], or_else: float | None) -> Rule:
    if or_else is None:
        return Rule(text, inside)
    return Rule(f"{text}, or {or_else}", lambda value: value == or_else or inside(value))


def one_of(*choices: str) -> Rule:
    return Rule(f"one of {', '.join(choices)}", lambda value: value in choices)


def key(default: T, help: str, rule: Rule | None = None) -> T:
    """Declare a key of a section: `steps: int = key(5_000, "Training steps of the run.", at_least(1))`."""
    return dataclasses.field(default=default, metadata={"help": help, "rule": rule})


@dataclass(frozen=True, kw_only=True)
class KeyInfo:
    """All that is known about a key."""

    name: str
    section: str
    kind: type
    default: Value
    help: str
    rule: Rule | None

    @classmethod
    def of(cls, field: "dataclasses.Field[Any]", section: str) -> Self:
        kind = cast(type, field.type)
        return cls(name=field.name, section=section, kind=kind, default=cast(Value, field.default), **field.metadata)

    def checked(self, value: object) -> Value:
        """The value, an integer given for a number made one; an error if it is of another type or breaks the rule."""
        if type(value) is int and abs(value) >= 10**_MOST_DIGITS:
            raise self._must_be(f"a number of at most {_MOST_DIGITS} digits", value)
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind or (isinstance(value, float) and not math.isfinite(value)):
            raise self._must_be(_TYPE_NAMES[self.kind], value)
        if isinstance(value, str) and _CONTROL.search(value):
            raise self._must_be("text without line breaks and other control characters", value)
        try:
            accepted = self.rule is None or self.rule.accepts(value)
        except PingLlmError as error:
            raise PingLlmError(f"{self.name}: {error}") from None
        if self.rule and not accepted:
            raise self._must_be(self.rule.text, value)
        return cast(Value, value)

    def parsed(self, text: str) -> Value:
        """The value that a text stands for. The type of the key decides, so `run_name=007` stays `007`."""
        value = _PARSERS[self.kind](text)
        if value is None:
            raise self._must_be(_TYPE_NAMES[self.kind], text)
        return self.checked(value)

    def _must_be(self, what: str, value: object) -> PingLlmError:
        return PingLlmError(f"{self.name} must be {what}, not {shown(value)}")


def _parse_bool(text: str) -> bool | None:
    return _BOOLEANS.get(text.strip().lower())


def _parse_int(text: str) -> int | None:
    """`1000`, `1_000` and `1e3` alike; nothing is rounded."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    if not number.is_finite() or number != number.to_integral_value():
        return None
    # Not a gigabyte of digits for `1e999999999`: any number that is too long gets the same answer.
    return int(number) if number.adjusted() < _MOST_DIGITS else 10**_MOST_DIGITS


def _parse_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


_PARSERS: Final[dict[type, Callable[[str], Value | None]]] = {
    bool: _parse_bool,
    int: _parse_int,
    float: _parse_float,
    str: str,
}


def shown(value: object, limit: int = 120) -> str:
    """The value as it may stand in a message of one line."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def unknown_key(name: str, known: Collection[str]) -> PingLlmError:
    wanted = name.lower().replace("-", "_")
    parts_of = [candidate for candidate in known if wanted in candidate]  # `batch_size`: per_device_batch_size
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.7) or (parts_of if len(parts_of) <= 3 else [])
    advice = f"did you mean {' or '.join(near)}?" if near else "`python -m ping_llm.config` lists the keys there are"
    return PingLlmError(f"unknown key {shown(name)}: {advice}")


class Section:
    """Base of the frozen dataclasses that declare keys. Its docstring introduces the keys in the documentation.

    A section with a condition on several keys overrides `__post_init__`, calls the inherited one first, and raises
    `PingLlmError` with a message that names the keys.
    """

    title: ClassVar[str]

    @classmethod
    def sections(cls) -> tuple[type["Section"], ...]:
        """Those this class is put together from (itself, if it is one), in the order in which it names them."""
        return tuple(base for base in cls.__mro__ if "title" in vars(base))

    @classmethod
    def describe(cls) -> tuple[KeyInfo, ...]:
        """Its keys, section by section."""
        fields = [
            (field, section.title) for section in cls.sections() for field in dataclasses.fields(cast(Any, section))
        ]
        return tuple(KeyInfo.of(field, title) for field, title in fields)

    def __post_init__(self) -> None:
        for info in self.describe():
            object.__setattr__(self, info.name, info.checked(getattr(self, info.name)))
