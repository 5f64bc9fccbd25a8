"""The 267 tokens: eleven roles, then the 256 bytes.

    measurement := MEASUREMENT_START field{3,4}      fields in any order
    field       := source | destination | result | time
    source      := SRC_IPV4 b{4} | SRC_IPV6 b{16}    destination likewise with DST_*
    result      := RTT_START b b | FAILED
    time        := TIMESTAMP_ABS b{8} | TIMESTAMP_DELTA1 b | TIMESTAMP_DELTA4 b{4}

An absolute time is big-endian Unix seconds. A delta is the whole seconds since the previous measurement of the context
that carries a time. The RTT code is explained in `rtt_code.py`.
"""

from dataclasses import dataclass
from enum import IntEnum
from itertools import permutations
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.core.distribution import encode_rtt

TOKEN_VERSION: Final = 1
"""Raised whenever equal measurements would become other tokens. Part of what a data state is checked against."""


class Role(IntEnum):
    """Tokens that say what follows."""

    MEASUREMENT_START = 0
    SRC_IPV4 = 1
    SRC_IPV6 = 2
    DST_IPV4 = 3
    DST_IPV6 = 4
    TIMESTAMP_ABS = 5
    TIMESTAMP_DELTA1 = 6
    TIMESTAMP_DELTA4 = 7
    RTT_START = 8
    THROUGHPUT_START = 9  # reserved
    FAILED = 10


FIRST_BYTE: Final = 11
"""Byte b is token FIRST_BYTE + b."""

VOCABULARY_SIZE: Final = FIRST_BYTE + 256

BYTES_AFTER: Final = {
    Role.SRC_IPV4: 4,
    Role.SRC_IPV6: 16,
    Role.DST_IPV4: 4,
    Role.DST_IPV6: 16,
    Role.TIMESTAMP_ABS: 8,
    Role.TIMESTAMP_DELTA1: 1,
    Role.TIMESTAMP_DELTA4: 4,
    Role.RTT_START: 2,
    Role.FAILED: 0,
}
"""How many byte tokens follow each role that begins a field."""


# Measurements to tokens, a whole batch in a few array operations.
#
# What a measurement becomes depends on its *form*: family, failed or not, kind of time, order of the fields. There are
# 384 forms, and for each a *template* says which token stands at which place: either a constant or a byte of the
# measurement. Encoding is then one gather: the template's places out of a small table of each measurement's tokens.


class TimeKind(IntEnum):
    """How a measurement says when it was."""

    NONE = 0
    ABSOLUTE = 1
    DELTA1 = 2
    DELTA4 = 3


FIELD_ORDERS: Final = tuple(permutations(("source", "destination", "result", "time")))
"""All 24 orders. A measurement without a time has each order of its three fields in four of them."""

# Columns of the table of a measurement's own tokens.
_SOURCE, _DESTINATION, _RTT, _TIME = 0, 16, 32, 34
_BYTES: Final = 42
_WIDTH: Final = _BYTES + len(Role)  # after the bytes come all roles, so that a template can name them too

_LONGEST: Final = 1 + 17 + 17 + 3 + 9

_TIME_ROLES: Final = {
    TimeKind.ABSOLUTE: Role.TIMESTAMP_ABS,
    TimeKind.DELTA1: Role.TIMESTAMP_DELTA1,
    TimeKind.DELTA4: Role.TIMESTAMP_DELTA4,
}


def _template(family: int, failed: bool, time: TimeKind, order: tuple[str, ...]) -> list[int]:
    """Columns of the token table, in the order in which this form writes them."""

    def field(role: Role, column: int) -> list[int]:
        return [_BYTES + role, *range(column, column + BYTES_AFTER[role])]

    fields = {
        "source": field(Role.SRC_IPV4 if family == 4 else Role.SRC_IPV6, _SOURCE),
        "destination": field(Role.DST_IPV4 if family == 4 else Role.DST_IPV6, _DESTINATION),
        "result": field(Role.FAILED if failed else Role.RTT_START, _RTT),
        "time": [],
    }
    if time is not TimeKind.NONE:  # the value is right-aligned in its eight bytes
        role = _TIME_ROLES[time]
        fields["time"] = field(role, _TIME + 8 - BYTES_AFTER[role])
    return [_BYTES + Role.MEASUREMENT_START, *(column for name in order for column in fields[name])]


_FORMS: Final = [
    _template(family, failed, time, order)
    for family in (4, 6)
    for failed in (False, True)
    for time in TimeKind
    for order in FIELD_ORDERS
]
_FORM_LENGTHS: Final = np.array([len(form) for form in _FORMS])
_TEMPLATES: Final = np.array([form + [0] * (_LONGEST - len(form)) for form in _FORMS]).reshape(-1)


@dataclass(frozen=True, kw_only=True)
class EncodableMeasurements:
    """Measurements as columns, with the choices that encoding leaves open already made."""

    family: npt.NDArray[np.uint8]
    source: npt.NDArray[np.uint8]
    """(measurements, 16), IPv4 in the first four bytes; likewise the destination."""
    destination: npt.NDArray[np.uint8]
    rtt_ms: npt.NDArray[np.float32]
    time_kind: npt.NDArray[np.uint8]
    time_value: npt.NDArray[np.int64]
    """Unix seconds, or the seconds since the previous timed measurement: what `time_kind` says."""
    order: npt.NDArray[np.uint8]
    """Index into `FIELD_ORDERS`."""

    def __len__(self) -> int:
        return len(self.family)


def token_counts(family: Any, failed: Any, time_kind: Any) -> npt.NDArray[np.int64]:
    """Tokens that each measurement takes."""
    return _FORM_LENGTHS[_form(family, failed, time_kind, 0)]


def _form(family: Any, failed: Any, time_kind: Any, order: Any) -> Any:
    flags = (np.asarray(family) == 6) * 2 + np.asarray(failed, dtype=np.int64)
    return (flags * len(TimeKind) + time_kind) * len(FIELD_ORDERS) + order


def field_places() -> npt.NDArray[np.uint8]:
    """(forms, 5): where source, destination, result and time begin in each form, and its length.

    Forms are ordered by family, failed or not, kind of time and field order, as they are counted above.
    """
    roles = (
        {Role.SRC_IPV4, Role.SRC_IPV6},
        {Role.DST_IPV4, Role.DST_IPV6},
        {Role.RTT_START, Role.FAILED},
        set(_TIME_ROLES.values()),
    )
    places = [
        [next((at for at, column in enumerate(form) if column - _BYTES in field), 0) for field in roles] + [len(form)]
        for form in _FORMS
    ]
    return np.array(places, dtype=np.uint8)


def encode(measurements: EncodableMeasurements) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
    """All tokens, one measurement after the other, and how many each took."""
    count = len(measurements)
    failed = np.isnan(measurements.rtt_ms)
    form = _form(measurements.family, failed, measurements.time_kind, measurements.order)
    lengths = _FORM_LENGTHS[form]

    table = np.empty((count, _WIDTH), dtype=np.uint16)
    table[:, _SOURCE:_DESTINATION] = measurements.source
    table[:, _DESTINATION:_RTT] = measurements.destination
    table[:, _RTT:_TIME] = encode_rtt(measurements.rtt_ms).astype(">u2").view(np.uint8).reshape(-1, 2)
    table[:, _TIME:_BYTES] = measurements.time_value.astype(">i8").view(np.uint8).reshape(-1, 8)
    table[:, :_BYTES] += FIRST_BYTE
    table[:, _BYTES:] = np.arange(len(Role), dtype=np.uint16)

    # Place of each token: its measurement's part of the table, plus the column that its template names there.
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1] if count else 0) - np.repeat(ends - lengths, lengths)
    columns = _TEMPLATES[np.repeat(form * _LONGEST, lengths) + within]
    return table.reshape(-1)[np.repeat(np.arange(count) * _WIDTH, lengths) + columns], lengths
