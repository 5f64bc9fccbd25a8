"""The measurement schema, and the validation that every measurement passes on its way in.

A *measurement* says that at `event_time` the host `src_addr` probed `dst_addr` and an answer came after `rtt`
milliseconds, or none came (`rtt` is null: the probe *failed*).

Readers accept what people really have (see `coerce.py` for the column types). A row that still cannot be used is
dropped and counted by reason; it is never repaired into something that was not measured.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ping_llm.addresses import UNPARSABLE, AddressColumn, parse_column
from ping_llm.coerce import rtt_milliseconds, time_microseconds

SCHEMA: Final = pa.schema(
    [
        pa.field("event_time", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("src_addr", pa.string(), nullable=False),
        pa.field("dst_addr", pa.string(), nullable=False),
        pa.field("ip_version", pa.int8(), nullable=False),
        pa.field("rtt", pa.float32()),
    ]
)

MAX_RTT_MS: Final = 600_000.0
"""Ten minutes. No ping tool waits that long, so a larger value is a unit error or garbage and the row is dropped."""

MAX_TIME_US: Final = 4_102_444_800_000_000
"""The year 2100. A later time, like one before 1970, is a unit error or garbage."""

DROP_REASONS: Final = {
    "malformed_row": "the line does not have the columns its header promises, or is not a JSON object",
    "missing_time": "no event time",
    "bad_time": "an event time that cannot be parsed, or is not between 1970 and 2100",
    "bad_src_addr": "no source address, or not an address",
    "bad_dst_addr": "no destination address, or not an address",
    "family_mismatch": "source, destination and ip_version are not all of one family",
    "bad_rtt": "an RTT that is NaN or not a number",
    "absurd_rtt": "an RTT above ten minutes, or infinite",
}
"""Why a row can be dropped. A row with several faults is counted under the first one in this order."""


@dataclass(frozen=True, kw_only=True)
class ValidMeasurements:
    """The usable measurements of one batch, as columns. A failed probe has the RTT NaN (one bit pattern only)."""

    time_us: npt.NDArray[np.int64]
    src: AddressColumn
    dst: AddressColumn
    family: npt.NDArray[np.uint8]
    rtt_ms: npt.NDArray[np.float32]
    dropped: Counter[str] = field(default_factory=Counter)
    first_dropped: tuple[int, str] | None = None
    """Position in the batch and reason of the first row that was dropped."""

    def __len__(self) -> int:
        return len(self.time_us)


def validate(batch: pa.RecordBatch) -> ValidMeasurements:
    """Check every row of a batch that has the schema's column names (of any accepted type; `ip_version` optional)."""
    count = batch.num_rows
    time_us, time_missing, time_bad = time_microseconds(batch.column("event_time"))
    rtt, rtt_bad = rtt_milliseconds(batch.column("rtt"))
    src = parse_column(batch.column("src_addr"))
    dst = parse_column(batch.column("dst_addr"))
    src_family, dst_family = src.family_of_each, dst.family_of_each

    mismatch = src_family != dst_family
    if "ip_version" in batch.schema.names:
        mismatch |= ~_agrees(batch.column("ip_version"), src_family)

    faults = {
        "missing_time": time_missing,
        "bad_time": time_bad | (time_us < 0) | (time_us >= MAX_TIME_US),
        "bad_src_addr": src_family == UNPARSABLE,
        "bad_dst_addr": dst_family == UNPARSABLE,
        "family_mismatch": mismatch,
        "bad_rtt": rtt_bad,
        "absurd_rtt": rtt > MAX_RTT_MS,
    }
    dropped: Counter[str] = Counter()
    first: tuple[int, str] | None = None
    unusable = np.zeros(count, dtype=bool)
    for reason, mask in faults.items():
        new = np.flatnonzero(mask & ~unusable)
        if len(new):
            dropped[reason] = len(new)
            unusable[new] = True
            if first is None or new[0] < first[0]:
                first = (int(new[0]), reason)

    # Negative means failed. Adding 0.0 turns -0.0 into 0.0: equal measurements must have equal bytes.
    rtt_ms = np.where(rtt >= 0, rtt, np.nan).astype(np.float32) + np.float32(0.0)
    valid = ValidMeasurements(time_us=time_us, src=src, dst=dst, family=src_family, rtt_ms=rtt_ms)
    return valid if first is None else _keep(valid, ~unusable, dropped, first)


def _agrees(ip_version: Any, family: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Whether the stated version is the family of the addresses; a missing version agrees with any."""
    versions = ip_version
    if not pa.types.is_integer(versions.type):
        versions, _ = rtt_milliseconds(versions)  # digits in a text column: the same lenient reading of numbers
        return np.isnan(versions) | (versions == family)
    stated = versions.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return (stated == 0) | (stated == family)


def _keep(
    valid: ValidMeasurements, keep: npt.NDArray[np.bool_], dropped: Counter[str], first: tuple[int, str]
) -> ValidMeasurements:
    def kept(column: AddressColumn) -> AddressColumn:
        return AddressColumn(families=column.families, packed=column.packed, codes=column.codes[keep])

    return ValidMeasurements(
        time_us=valid.time_us[keep],
        src=kept(valid.src),
        dst=kept(valid.dst),
        family=valid.family[keep],
        rtt_ms=valid.rtt_ms[keep],
        dropped=dropped,
        first_dropped=first,
    )
