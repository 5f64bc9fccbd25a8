"""Blends of several data sets with their shares, written `a/*.arrayrecord,0.3;b/*.arrayrecord,0.7`."""

import re
from fractions import Fraction
from itertools import pairwise
from typing import Final

from ping_llm.core.errors import PingLlmError

Blend = tuple[tuple[str, Fraction], ...]

# Two digits of exponent are plenty, and keep `1e999999999` from filling the memory.
_STEP: Final = re.compile(r"\d[\d_]{0,17}", re.ASCII)
_WEIGHT: Final = re.compile(r"(\d{1,30}(\.\d{0,30})?|\.\d{1,30})(e[+-]?\d{1,2})?", re.ASCII | re.IGNORECASE)


def parse_blend(text: str) -> Blend:
    """The patterns of a blend with their shares, which are exact fractions and sum to 1.

    The weight follows the last `,` of a part, or its last `:` unless that belongs to the path, as in `gs://…` or
    `C:\\…`. A single pattern needs no weight. Of several patterns each needs one, since without it equal shares or
    shares by size could be meant. A weight may be 0: the data stays in the blend, but nothing is drawn from it.
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


def parse_schedule(text: str) -> tuple[tuple[int, tuple[Fraction, ...]], ...]:
    """Steps from which other weights apply, in the order of the blend: `20_000: 0.2,0.5,0.3; 40_000: 1,0,0`."""
    found: list[tuple[int, tuple[Fraction, ...]]] = []
    for part in text.split(";") if text.strip() else ():
        step, _, weights = part.partition(":")
        numbers = [weight.strip() for weight in weights.split(",")]
        if not _STEP.fullmatch(step.strip()) or not all(map(_WEIGHT.fullmatch, numbers)):
            raise PingLlmError(f"{part.strip()!r}: write STEP: weight,weight with a weight for each part of the blend")
        shares = list(map(Fraction, numbers))
        if not sum(shares):
            raise PingLlmError(f"the weights in {part.strip()!r} are all 0; at least one must be positive")
        found.append((int(step), tuple(share / sum(shares) for share in shares)))
    if [step for step, _ in found] != sorted({step for step, _ in found}):
        raise PingLlmError("steps must rise from one part of the schedule to the next")
    return tuple(found)


def parse_steps(text: str) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of steps: `10_240:10_260, 11_000:11_004`."""
    found: list[tuple[int, int]] = []
    for part in text.split(",") if text.strip() else ():
        begin, _, end = (piece.strip() for piece in part.partition(":"))
        if not _STEP.fullmatch(begin) or not _STEP.fullmatch(end) or int(begin) >= int(end):
            raise PingLlmError(f"{part.strip()!r}: write FIRST:END, such as 10_240:10_260")
        found.append((int(begin), int(end)))
    found.sort()
    if any(end > begin for (_, end), (begin, _) in pairwise(found)):
        raise PingLlmError(f"the steps in {text!r} overlap")
    return tuple(found)


def _pattern_and_weight(part: str) -> tuple[str, str | None]:
    pattern, separator, weight = (piece.strip() for piece in part.rpartition("," if "," in part else ":"))
    if separator == ",":
        return pattern, weight
    drive = len(pattern) == 1 and not _WEIGHT.fullmatch(weight)  # `C:rows`, but not `a:0.3`
    return (part, None) if not separator or "/" in weight or drive else (pattern, weight)
