"""The vocabulary of measurements: 267 tokens, eleven roles and then the 256 bytes.

    measurement := MEASUREMENT_START field{3,4}      fields in any order
    field       := source | destination | result | time
    source      := SRC_IPV4 b{4} | SRC_IPV6 b{16}    destination likewise with DST_*
    result      := RTT_START b b | FAILED
    time        := TIMESTAMP_ABS b{8} | TIMESTAMP_DELTA1 b | TIMESTAMP_DELTA4 b{4}

An absolute time is big-endian Unix seconds. A delta is the whole seconds since the previous measurement of the context
that carries a time. The 16-bit RTT code is explained in `core/rtt.py`.

`encode.py` writes measurements as tokens (compiled), `decode.py` reads them back.
"""

from enum import IntEnum
from itertools import permutations
from typing import Any, Final

import numpy as np
import numpy.typing as npt

TOKEN_VERSION: Final = 1
"""To be increased when equal measurements become other tokens. A data state is checked against it."""


class Role(IntEnum):
    """Tokens that name the field whose bytes follow."""

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

ROLES_OF: Final = {
    "source": {Role.SRC_IPV4: 4, Role.SRC_IPV6: 16},
    "destination": {Role.DST_IPV4: 4, Role.DST_IPV6: 16},
    "result": {Role.RTT_START: 2, Role.FAILED: 0},
    "time": {Role.TIMESTAMP_ABS: 8, Role.TIMESTAMP_DELTA1: 1, Role.TIMESTAMP_DELTA4: 4},
}
"""The roles that each field may begin with, and how many byte tokens follow them."""
BYTES_AFTER: Final = {role: size for roles in ROLES_OF.values() for role, size in roles.items()}


class TimeKind(IntEnum):
    """The form of a measurement's time."""

    NONE = 0
    ABSOLUTE = 1
    DELTA1 = 2
    DELTA4 = 3


LONGEST_DELTA1_S: Final = 255
"""A longer gap than this is a DELTA4."""

FIELDS: Final = tuple(ROLES_OF)
FIELD_ORDERS: Final = tuple(permutations(FIELDS))
"""All 24 orders. A measurement without a time has each order of its three fields in four of them."""
RESULT_LAST: Final = FIELD_ORDERS.index(("time", "source", "destination", "result"))
"""The order in which a result is predicted."""

_TIME_TOKENS: Final = np.array([0, *(1 + size for size in ROLES_OF["time"].values())])


def field_sizes(family: Any, failed: Any, time_kind: Any) -> tuple[Any, Any, Any, Any]:
    """Tokens of each of the `FIELDS`, with the role that begins it."""
    address = np.where(np.asarray(family) == 6, 1 + BYTES_AFTER[Role.SRC_IPV6], 1 + BYTES_AFTER[Role.SRC_IPV4])
    result = np.where(failed, 1 + BYTES_AFTER[Role.FAILED], 1 + BYTES_AFTER[Role.RTT_START])
    return address, address, result, _TIME_TOKENS[time_kind]


def token_counts(family: Any, failed: Any, time_kind: Any) -> npt.NDArray[np.int64]:
    """Tokens that each measurement takes."""
    return np.asarray(1 + sum(field_sizes(family, failed, time_kind)))
