"""The 267 tokens: eleven roles, then the 256 bytes.

    measurement := MEASUREMENT_START field{3,4}      fields in any order
    field       := source | destination | result | time
    source      := SRC_IPV4 b{4} | SRC_IPV6 b{16}    destination likewise with DST_*
    result      := RTT_START b b | FAILED
    time        := TIMESTAMP_ABS b{8} | TIMESTAMP_DELTA1 b | TIMESTAMP_DELTA4 b{4}

An absolute time is big-endian Unix seconds. A delta is the whole seconds since the previous measurement of the context
that carries a time. The RTT code is explained in `rtt_code.py`.
"""

from enum import IntEnum
from typing import Final

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
