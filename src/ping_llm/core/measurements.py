"""Lenient reading of times and numbers: what people really have in these columns becomes one type.

Times may be timestamps of any unit, naive (taken as UTC) or with a zone, epoch numbers, or text of either kind.
Nothing here raises for a bad *value*: it comes back flagged. A bad *type* raises `TypeError`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ping_llm.core.addresses import UNPARSABLE, AddressColumn, parse_column

Flags = npt.NDArray[np.bool_]

MISSING_TEXT: Final = frozenset({"", "*", "-", "null", "none", "na", "n/a", "timeout"})
"""What an empty cell is spelled as in text columns. For an RTT it means that the probe failed."""

_EPOCH_UNITS: Final = ((1e11, 1e6), (1e14, 1e3), (1e17, 1.0), (np.inf, 1e-3))
"""(upper bound, microseconds per unit): seconds up to the year 5138, then milli-, micro- and nanoseconds."""

_TICKS_PER_SECOND: Final = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def time_microseconds(column: Any) -> tuple[npt.NDArray[np.int64], Flags, Flags]:
    """Microseconds since 1970 of each value, with flags for the missing and for the unusable ones."""
    plain = _plain(column)
    kind = plain.type
    if _is_text(kind):
        return _text_times(plain)
    missing = _is_null(plain)
    if pa.types.is_null(kind):
        return np.zeros(len(column), dtype=np.int64), missing, _none(column)
    if pa.types.is_timestamp(kind):
        ticks = plain.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
        return _to_microseconds(ticks, _TICKS_PER_SECOND[kind.unit]), missing, _none(column)
    if pa.types.is_integer(kind):  # integers stay integers: a float has 53 bits, nanoseconds need 61
        numbers = plain.cast(pa.int64(), safe=False).fill_null(0).to_numpy(zero_copy_only=False)
        return _epoch_integers(numbers), missing, _none(column)
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        micros, bad = _epoch_floats(_floats(plain))
        return micros, missing, bad & ~missing
    raise TypeError(f"column event_time has type {kind}; expected a timestamp, epoch seconds or ISO 8601 text")


def rtt_milliseconds(column: Any) -> tuple[npt.NDArray[np.float64], Flags]:
    """The number in each cell; NaN where there is none, with a flag for NaN and for text that is no number."""
    plain = _plain(column)
    kind = plain.type
    if pa.types.is_null(kind):  # a file in which every probe failed may have no other type
        return np.full(len(column), np.nan), _none(column)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        values = _floats(plain)
        return values, np.isnan(values) & ~_is_null(plain)
    if _is_text(kind):
        numbers, absent, bad = _parse_text(plain, float, pa.float64())
        values = np.where(absent | bad, np.nan, numbers)
        return values, bad | (np.isnan(values) & ~absent)
    raise TypeError(f"column rtt has type {kind}; expected numbers (milliseconds)")


def _to_microseconds(ticks: npt.NDArray[np.int64], per_second: int) -> npt.NDArray[np.int64]:
    """Rescale, cutting nanoseconds; what overflows becomes -1, which no valid time is."""
    if per_second >= 1_000_000:
        return ticks // (per_second // 1_000_000)
    factor = 1_000_000 // per_second
    limit = np.iinfo(np.int64).max // factor
    return np.where((ticks >= 0) & (ticks <= limit), ticks, -1) * factor


def _epoch_integers(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    bounds = [numbers < bound for bound in (10**11, 10**14, 10**17)]
    scaled = [_to_microseconds(numbers, per_second) for per_second in (1, 10**3, 10**6)]
    return np.select(bounds, scaled, numbers // 1000)


def _epoch_floats(values: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], Flags]:
    bad = ~np.isfinite(values)
    usable = np.where(bad, 0.0, values)
    scale = np.select([usable < bound for bound, _ in _EPOCH_UNITS], [unit for _, unit in _EPOCH_UNITS])
    with np.errstate(over="ignore"):  # infinity is clipped like any other time too far away
        return np.round(np.clip(usable * scale, -1, 9e18)).astype(np.int64), bad


def _text_times(column: Any) -> tuple[npt.NDArray[np.int64], Flags, Flags]:
    try:  # the common case, in one pass: every cell a number, or none
        numbers, missing, bad = _parse_text(column, None, pa.float64())
        micros, unusable = _epoch_floats(numbers)
        return micros, missing, (bad | unusable) & ~missing
    except pa.ArrowInvalid:
        return _parse_text(column, _time_from_text, pa.int64())


def _time_from_text(text: str) -> int:
    try:
        number = float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        whole = int(moment.replace(microsecond=0).timestamp())
        return whole * 1_000_000 + moment.microsecond
    micros, bad = _epoch_floats(np.array([number]))
    if bad[0]:
        raise ValueError(text)
    return int(micros[0])


def _parse_text(column: Any, parse: Callable[[str], float] | None, kind: Any) -> tuple[npt.NDArray[Any], Flags, Flags]:
    """Numbers in a text column, with flags for missing and for bad cells.

    Arrow's cast does a clean column at full speed. It refuses the whole column for one bad cell; then each cell goes
    through `parse` (or, without one, the refusal is raised).
    """
    text = pc.utf8_trim_whitespace(column)
    absent = pc.or_kleene(pc.is_null(text), pc.is_in(pc.utf8_lower(text), pa.array(sorted(MISSING_TEXT))))
    missing = absent.to_numpy(zero_copy_only=False)
    present = pc.if_else(absent, pa.scalar(None, text.type), text)
    try:
        values = present.cast(kind).fill_null(0).to_numpy(zero_copy_only=False)
        return values, missing, _none(column)
    except pa.ArrowInvalid:
        if parse is None:
            raise
    values = np.zeros(len(missing), dtype=kind.to_pandas_dtype())
    bad = _none(column)
    for i, cell in enumerate(present.to_pylist()):
        if cell is not None:
            try:
                values[i] = parse(cell)
            except (ValueError, OverflowError):
                bad[i] = True
    return values, missing, bad


def _plain(column: Any) -> Any:
    """The column without dictionary encoding, text as plain strings."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pa.large_string()) if _is_text(column.type) else column


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _floats(column: Any) -> npt.NDArray[np.float64]:
    return column.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy(zero_copy_only=False)


def _none(column: Any) -> Flags:
    return np.zeros(len(column), dtype=bool)


def _is_null(column: Any) -> Flags:
    return column.is_null().to_numpy(zero_copy_only=False)


# The measurement schema, and the validation that every measurement passes on its way in.
#
# A *measurement* says that at `event_time` the host `src_addr` probed `dst_addr` and an answer came after `rtt`
# milliseconds, or none came (`rtt` is null: the probe *failed*).
#
# Readers accept what people really have (see `coerce.py` for the column types). A row that still cannot be used is
# dropped and counted by reason; it is never repaired into something that was not measured.

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
