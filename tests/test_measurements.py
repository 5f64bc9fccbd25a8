"""Validation: what is accepted, what is dropped, and under which reason."""

import math
from datetime import UTC, datetime, timedelta, timezone
from ipaddress import ip_address
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ping_llm.core.cells import Spelling, time_microseconds
from ping_llm.core.measurements import (
    DROP_REASONS,
    MAX_RTT_MS,
    SCHEMA,
    format_address,
    parse_addresses,
    source_hash,
    validate,
)

GOOD = {"event_time": 1_700_000_000, "src_addr": "192.0.2.1", "dst_addr": "198.51.100.7", "ip_version": 4, "rtt": 12.5}


def batch(*rows: dict[str, Any], **types: Any) -> pa.RecordBatch:
    rows = tuple({**GOOD, **row} for row in rows)
    names = list(dict.fromkeys(name for row in rows for name in row if row[name] is not ...))
    columns = [pa.array([row[name] for row in rows], type=types.get(name)) for name in names]
    return pa.RecordBatch.from_arrays(columns, names=names)


def reason_of(**row: Any) -> str | None:
    valid = validate(batch(row))
    assert len(valid) + valid.dropped.total() == 1
    return next(iter(valid.dropped), None)


def test_a_good_measurement_is_kept_as_it_is() -> None:
    valid = validate(batch({}))
    assert valid.time_us.tolist() == [1_700_000_000_000_000]
    assert valid.rtt_ms.tolist() == [12.5]
    assert valid.family.tolist() == [4]
    assert format_address(4, valid.src.packed[valid.src.codes[0]].tobytes()) == "192.0.2.1"
    assert not valid.dropped


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"event_time": None}, "missing_time"),
        ({"event_time": -5}, "bad_time"),
        ({"event_time": 99_999_999_999}, "bad_time"),
        ({"src_addr": None}, "bad_src_addr"),
        ({"src_addr": ""}, "bad_src_addr"),
        ({"src_addr": "192.0.2"}, "bad_src_addr"),
        ({"src_addr": "192.0.2.1.5"}, "bad_src_addr"),
        ({"src_addr": "probe\x00"}, "bad_src_addr"),
        ({"dst_addr": None}, "bad_dst_addr"),
        ({"src_addr": "300.1.2.3"}, "bad_src_addr"),
        ({"src_addr": "2001:db8::x"}, "bad_src_addr"),
        ({"dst_addr": "192.0.2.0/24"}, "bad_dst_addr"),
        ({"dst_addr": "?"}, "bad_dst_addr"),
        ({"dst_addr": "n/a"}, "bad_dst_addr"),
        ({"dst_addr": "x" * 300}, "bad_dst_addr"),
        ({"dst_addr": "2001:db8::1"}, "family_mismatch"),
        ({"ip_version": 6}, "family_mismatch"),
        ({"rtt": math.nan}, "bad_rtt"),
        ({"rtt": 0.0}, "zero_rtt"),
        ({"rtt": -0.0}, "zero_rtt"),
        ({"rtt": math.inf}, "absurd_rtt"),
        ({"rtt": MAX_RTT_MS * 1.01}, "absurd_rtt"),
    ],
)
def test_an_unusable_row_is_dropped_under_its_reason(row: dict[str, Any], reason: str) -> None:
    assert reason in DROP_REASONS
    assert reason_of(**row) == reason


@pytest.mark.parametrize(
    "row",
    [
        {"rtt": None},
        {"rtt": -1.0},
        {"ip_version": None},
        {"ip_version": ...},
        {"ip_version": 0},
        {"ip_version": "4"},
        {"src_addr": "2001:db8::1", "dst_addr": "2001:db8::2", "ip_version": 6},
        {"src_addr": " 192.0.2.1 "},
        {"src_addr": "192.0.2.1:443"},
        {"src_addr": "[2001:db8::1]:443", "dst_addr": "2001:db8::2", "ip_version": 6},
        {"src_addr": "fe80::1%eth0", "dst_addr": "fe80::2", "ip_version": 6},
        {"dst_addr": "example.org"},
        {"src_addr": "probe 6012", "dst_addr": "New York"},
    ],
)
def test_what_people_really_have_is_kept(row: dict[str, Any]) -> None:
    assert reason_of(**row) is None


def test_failed_is_null_or_negative_and_nothing_else() -> None:
    valid = validate(batch({"rtt": None}, {"rtt": -1.0}, {"rtt": 0.01}, {"rtt": 3.0}))
    assert np.isnan(valid.rtt_ms).tolist() == [True, True, False, False]
    assert len(set(valid.rtt_ms[:2].view(np.uint32).tolist())) == 1, "one bit pattern for failed"


def test_a_row_with_several_faults_counts_once_under_the_first_reason() -> None:
    valid = validate(batch({"event_time": None, "src_addr": "?", "rtt": math.nan}, {"src_addr": "?", "rtt": math.nan}))
    assert valid.dropped == {"missing_time": 1, "bad_src_addr": 1}
    assert valid.first_dropped == {"missing_time": 0, "bad_src_addr": 1}


def test_good_rows_survive_beside_bad_ones_and_nothing_is_lost() -> None:
    valid = validate(batch({"rtt": 1.0}, {"dst_addr": "?"}, {"rtt": 2.0}, {"rtt": math.inf}, {"rtt": 3.0}))
    assert valid.rtt_ms.tolist() == [1.0, 2.0, 3.0]
    assert valid.dropped == {"bad_dst_addr": 1, "absurd_rtt": 1}
    assert valid.first_dropped == {"bad_dst_addr": 1, "absurd_rtt": 3}


MOMENT = datetime(2024, 5, 6, 7, 8, 9, 250_000, tzinfo=UTC)
MICROS = 1_714_979_289_250_000


@pytest.mark.parametrize(
    "column",
    [
        pa.array([MOMENT], pa.timestamp("us", tz="UTC")),
        pa.array([MOMENT.replace(tzinfo=None)], pa.timestamp("us")),
        pa.array([MOMENT], pa.timestamp("ns", tz="Asia/Tokyo")),
        pa.array([MICROS // 1000], pa.timestamp("ms")),
        pa.array([MICROS]),
        pa.array([MICROS // 1000]),
        pa.array([MICROS * 1000 + 999]),
        pa.array([MICROS / 1e6]),
        pa.array(["2024-05-06T07:08:09.250Z"]),
        pa.array(["2024-05-06 07:08:09.250"]),
        pa.array(["2024-05-06T09:08:09.250000+02:00"]).dictionary_encode(),
        pa.array([" 1714979289.25 "]),
        pa.array(["1714979289.25"], pa.large_string()),
    ],
    ids=lambda column: f"{column.type}:{column[0]}",
)
def test_a_time_is_understood_in_any_usual_form(column: Any) -> None:
    micros, missing, bad = time_microseconds(column)
    assert (micros.tolist(), missing.tolist(), bad.tolist()) == ([MICROS], [False], [False])


def test_text_columns_may_mix_forms_and_a_bad_cell_costs_only_its_row() -> None:
    times = ["2024-05-06T07:08:09.250Z", "1714979289.25", "yesterday", "", "nan"]
    micros, missing, bad = time_microseconds(pa.array(times))
    assert micros[:2].tolist() == [MICROS, MICROS]
    assert missing.tolist() == [False, False, False, True, False]
    assert bad.tolist() == [False, False, True, False, True]


@given(st.datetimes(datetime(1970, 1, 2), datetime(2099, 12, 30)), st.integers(-720, 720))
def test_iso_text_with_any_offset_is_exact_to_the_microsecond(moment: datetime, offset_minutes: int) -> None:
    zoned = moment.replace(tzinfo=timezone(timedelta(minutes=offset_minutes)))
    expected = (zoned - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    assert time_microseconds(pa.array([zoned.isoformat()]))[0].tolist() == [expected]


@pytest.mark.parametrize("text", ["*", "timeout", "", "N/A", "-"])
def test_a_text_rtt_that_says_nothing_came_back_is_a_failure(text: str) -> None:
    valid = validate(batch({"rtt": text}, {"rtt": "7.5"}))
    assert np.isnan(valid.rtt_ms).tolist() == [True, False]


def test_a_text_rtt_that_is_garbage_is_dropped() -> None:
    valid = validate(batch({"rtt": "7.5 parsecs"}, {"rtt": "7,5"}, {"rtt": "nan"}, {"rtt": "8"}))
    assert valid.dropped == {"bad_rtt": 3}
    assert valid.rtt_ms.tolist() == [8.0]


@pytest.mark.parametrize("text", ["7.5 ms", "7.5ms", "7500us", "7500 µs", "0.0075 s", "7.5 MSEC", "7500000ns"])
def test_a_unit_in_the_cell_counts(text: str) -> None:
    assert validate(batch({"rtt": text}, {"rtt": "8"})).rtt_ms.tolist() == [7.5, 8.0]


@pytest.mark.parametrize(("text", "expected"), [("7,5", 7.5), ("1.234,5", 1234.5), ("7.5", 7.5), ("7,5 ms", 7.5)])
def test_decimal_commas_are_read_where_the_table_has_them(text: str, expected: float) -> None:
    assert validate(batch({"rtt": text}), Spelling(decimal_comma=True)).rtt_ms.tolist() == [expected]


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("06.05.2024 07:08:09,25", None),
        ("06/05/2024 07:08:09.25", "dmy"),
        ("05/06/2024 07:08:09.25 AM", "mdy"),
        ("6-May-2024 07:08:09.250", None),
        ("2024/05/06 07:08:09.250", None),
        ("06.05.24 07:08:09.25", None),
        ("2024-05-06 12:38:09.25 +0530", None),
    ],
)
def test_dates_are_read_in_the_order_of_the_table(text: str, order: str | None) -> None:
    micros, missing, bad = time_microseconds(pa.array([text]), Spelling(date_order=order))
    assert (micros.tolist(), missing.tolist(), bad.tolist()) == ([MICROS], [False], [False])


@pytest.mark.parametrize(
    "text", ["31.04.2024", "2024-02-30", "05/06/2024", "2024-05-06 25:00", "13:00 PM", "2024-13-01", "0000-00-00"]
)
def test_a_date_that_is_none_or_may_be_two_costs_its_row(text: str) -> None:
    assert validate(batch({"event_time": text}, {"event_time": "2024-05-06"})).dropped == {"bad_time": 1}


def test_names_stand_in_by_addresses_that_never_change() -> None:
    """Prepared rows hold them."""
    valid = validate(
        batch(
            {"dst_addr": "example.org"},
            {"src_addr": "lon"},
            {"src_addr": "lon", "dst_addr": "2001:db8::1", "ip_version": 0},
        )
    )
    found = valid.with_addresses({})
    texts = [
        [format_address(int(c.families[i]), c.packed[i].tobytes()) for i in c.codes.tolist()]
        for c in (found.src, found.dst)
    ]
    assert found.family.tolist() == [6, 6, 6]
    assert texts[0] == ["::ffff:192.0.2.1", LON, LON]
    assert texts[1] == [EXAMPLE_ORG, "::ffff:198.51.100.7", "2001:db8::1"]
    assert valid.with_addresses({"lon": "192.0.2.9", "example.org": "192.0.2.8"}).family.tolist() == [4, 4, 6]


LON, EXAMPLE_ORG = "2001:db8:e6e4:6209:22db:29a3:988a:f6f1", "2001:db8:71d0:5f80:efb7:8435:39b1:1770"


def test_a_column_of_the_wrong_type_is_refused_with_its_name() -> None:
    with pytest.raises(TypeError, match=r"event_time has type .*struct"):
        time_microseconds(pa.array([{"a": 1}]))


@given(st.lists(st.ip_addresses(), min_size=1, max_size=30))
def test_addresses_survive_packing(addresses: list[Any]) -> None:
    families, packed = parse_addresses([str(a) for a in addresses])
    assert families.tolist() == [a.version for a in addresses]
    for address, family, bytes_ in zip(addresses, families.tolist(), packed, strict=True):
        assert bytes_.tobytes() == address.packed.ljust(16, b"\0")
        assert ip_address(format_address(family, bytes_.tobytes())) == address


def test_the_source_hash_never_changes() -> None:
    """Partitions and splits are cut by it: another value would silently move sources between train and eval."""
    families, packed = parse_addresses(["192.0.2.1", "2001:db8::1", "0.0.0.0", "::"])
    assert [f"{h:016x}" for h in source_hash(families, packed).tolist()] == EXPECTED_HASHES
    assert len(set(EXPECTED_HASHES)) == 4


EXPECTED_HASHES = ["82af1a95e28f2b7d", "b66263f8e6b8851d", "39598f1a5f539b75", "00e78a7f576441a3"]


def test_the_schema_is_the_documented_one() -> None:
    assert SCHEMA.names == ["event_time", "src_addr", "dst_addr", "ip_version", "rtt"]
    assert SCHEMA.field("event_time").type == pa.timestamp("us", tz="UTC")
    assert SCHEMA.field("rtt").nullable
