"""What the value of a key may be, and the one-line error for anything else.

A key is a field of a pydantic model, `Section`. pydantic checks its type; a `Rule` in its annotation checks the rest:
`steps: Annotated[int, at_least(1)]`. Whatever is wrong becomes one `PingLlmError` that names the key, what it must be,
and what it was.
"""

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, ClassVar, Final

import pydantic
from pydantic import ValidationError, field_validator, model_validator
from pydantic_core import CoreSchema, core_schema

from ping_llm.core.errors import PingLlmError

_TYPE_NAMES: Final[dict[Any, str]] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    int | float: "a number",
    str: "text",
    str | int: "text or an integer",
}
_BOOLEANS: Final = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(("false", "no", "off"), False)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MAX_DIGITS: Final = 18
"""Of an integer, so that it fits 64 bits wherever it goes."""


@dataclass(frozen=True)
class Rule:
    """A condition on a value, for `Annotated`. `text` completes the sentence "must be …"; `accepts` may raise an error
    that says more."""

    text: str
    accepts: Callable[[Any], bool]

    def __get_pydantic_core_schema__(self, source: Any, handler: pydantic.GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: Any) -> Any:
        if not self.accepts(value):
            raise ValueError(self.text)
        return value


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


def key(default: Any, help: str) -> Any:
    """Declare a key of a section: `steps: Count = key(5_000, "Training steps of the run.")`."""
    return pydantic.Field(default, description=help)


class Section(pydantic.BaseModel):
    """Base of the models that declare keys. Its name and its docstring introduce the keys in the documentation."""

    model_config = pydantic.ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    noun: ClassVar[str] = "key"
    where_listed: ClassVar[str] = ""
    max_digits: ClassVar[int] = _MAX_DIGITS

    @model_validator(mode="before")
    @classmethod
    def _keys_exist(cls, values: dict[str, Any]) -> dict[str, Any]:
        for name in values:
            if name not in cls.model_fields:
                raise cls.unknown(name)
        return values

    @classmethod
    def unknown(cls, name: str) -> PingLlmError:
        """The error for a key that is not there: it names the nearest ones."""
        likely, known = name.lower().replace("-", "_"), list(cls.model_fields)
        containing = [candidate for candidate in known if likely in candidate]  # `batch_size`: per_device_batch_size
        near = difflib.get_close_matches(likely, known, n=3, cutoff=0.7) or (containing if len(containing) <= 3 else [])
        advice = f"did you mean {' or '.join(near)}?" if near else cls.where_listed or f"there are {', '.join(known)}"
        return PingLlmError(f"unknown {cls.noun} {shown(name)}: {advice}")

    @field_validator("*", mode="wrap")
    @classmethod
    def _refuse_in_one_line(cls, value: Any, check: Callable[[Any], Any], info: pydantic.ValidationInfo) -> Any:
        what = None
        if type(value) is int and abs(value) >= 10**cls.max_digits:
            what = f"a number of at most {cls.max_digits} digits"
        elif isinstance(value, str) and _CONTROL.search(value):
            what = "text without line breaks and other control characters"
        else:
            try:
                return check(value)
            except PingLlmError as error:
                raise PingLlmError(f"{info.field_name}: {error}") from None
            except ValidationError as error:
                problem = error.errors()[0]
                kind = cls.model_fields[info.field_name or ""].annotation
                what = problem["ctx"]["error"] if problem["type"] == "value_error" else _TYPE_NAMES[kind]
        raise PingLlmError(f"{info.field_name} must be {what}, not {shown(value)}")


def parsed(kind: Any, text: str) -> Any:
    """The value that a text stands for, or the text itself if it stands for none. The type of the key decides, so
    `run_name=007` stays `007`."""
    try:
        if kind is bool:
            return _BOOLEANS.get(text.strip().lower(), text)
        if kind is float:
            return float(text)
        if kind is int:  # `1000`, `1_000` and `1e3` alike; nothing is rounded
            number = Decimal(text)
            if number.is_finite() and number == number.to_integral_value():
                # Not a gigabyte of digits for `1e999999999`: any number that is too long gets the same answer.
                return int(number) if number.adjusted() < _MAX_DIGITS else 10**_MAX_DIGITS
    except (InvalidOperation, ValueError):
        pass
    return text


def shown(value: object, limit: int = 120) -> str:
    """The value as it may stand in a message of one line."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


# Blends: which data, and how much of each, as in `a/*.arrayrecord,0.3;b/*.arrayrecord,0.7`.

Blend = tuple[tuple[str, Fraction], ...]

# Two digits of exponent are plenty, and keep `1e999999999` from filling the memory.
_WEIGHT: Final = re.compile(r"(\d{1,30}(\.\d{0,30})?|\.\d{1,30})(e[+-]?\d{1,2})?", re.ASCII | re.IGNORECASE)


def parse_blend(text: str) -> Blend:
    """The patterns of a blend with their shares, which are exact fractions and sum to 1.

    The weight stands behind the last `,` of a part, or behind its last `:` unless that belongs to the path: a slash
    follows (`gs://…`), or it marks a drive (`C:\\…`). A pattern alone needs no weight; of several, each does, for it
    would be a guess whether equal shares are meant or shares by size. A weight may be 0: the source stays in the blend,
    but nothing is drawn from it.
    """
    parts = [part.strip() for part in text.split(";")]
    if not all(parts):
        where = f"the blend {text!r} has an empty part" if len(parts) > 1 else "no files are given"
        raise PingLlmError(f"{where}; write pattern,weight;pattern,weight")
    weights: dict[str, Fraction] = {}
    for part in parts:
        pattern, weight = _pattern_and_weight(part)
        if not pattern:
            raise PingLlmError(f"{part!r} has no pattern before its weight")
        if pattern in weights:
            raise PingLlmError(f"{pattern!r} is in the blend twice; give it once, with the sum of the weights")
        if weight is None and len(parts) > 1:
            raise PingLlmError(f"{pattern!r} has no weight; each part of a blend needs one: pattern,weight")
        if weight is not None and not _WEIGHT.fullmatch(weight):
            advice = "a number from 0 up must follow the last comma or colon, and `;` separates patterns"
            raise PingLlmError(f"{weight!r} in {part!r} is not a weight: {advice}")
        weights[pattern] = Fraction(weight or 1)
    total = sum(weights.values())
    if not total:
        raise PingLlmError(f"the weights in {text!r} are all 0; at least one must be positive")
    return tuple((pattern, weight / total) for pattern, weight in weights.items())


def _pattern_and_weight(part: str) -> tuple[str, str | None]:
    pattern, separator, weight = (piece.strip() for piece in part.rpartition("," if "," in part else ":"))
    if separator == ",":
        return pattern, weight
    drive = len(pattern) == 1 and not _WEIGHT.fullmatch(weight)  # `C:rows`, but not `a:0.3`
    return (part, None) if not separator or "/" in weight or drive else (pattern, weight)
