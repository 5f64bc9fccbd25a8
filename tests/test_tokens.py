"""Tokens: the vectorised encoder is the plain one, decoding is its inverse, and no tokens can break the decoder."""

import doctest
import json
from collections import Counter
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from ping_llm.core.measurements import ADDRESS_BYTES, format_address
from ping_llm.core.rtt import CODES, decode_rtt, encode_rtt
from ping_llm.tokens import BYTES_AFTER, FIELD_ORDERS, FIRST_BYTE, VOCABULARY_SIZE, Role, TimeKind, token_counts
from ping_llm.tokens.decode import Decoded, Fault, as_json, decode, render
from ping_llm.tokens.encode import encode
from plain_encoder import encode_one, rtt_code

NOON = 1_704_110_400  # 2024-01-01 12:00:00 UTC
SMALLEST = {TimeKind.NONE: 0, TimeKind.ABSOLUTE: -(2**63), TimeKind.DELTA1: 0, TimeKind.DELTA4: 0}
LARGEST = {TimeKind.NONE: 0, TimeKind.ABSOLUTE: 2**63 - 1, TimeKind.DELTA1: 255, TimeKind.DELTA4: 2**32 - 1}

Columns = dict[str, npt.NDArray[Any]]


def make(
    *,
    family: Any = 4,
    source: bytes | None = None,
    destination: bytes | None = None,
    rtt_ms: Any = 12.0,
    time: Any = TimeKind.NONE,
    value: Any = 0,
    order: Any = 0,
) -> Columns:
    """Measurements from columns or constants, of the addresses 192.0.2.1 and 198.51.100.7 or their IPv6 likes."""
    families, rtts, times, values, orders = np.broadcast_arrays(*np.atleast_1d(family, rtt_ms, time, value, order))

    def addresses(given: bytes | None, ipv4: list[int]) -> npt.NDArray[np.uint8]:
        packed = np.zeros((len(families), 16), dtype=np.uint8)
        packed[families == 4, :4] = ipv4
        packed[families == 6] = [0x20, 0x01, 0x0D, 0xB8, *[0] * 11, ipv4[3]]
        if given is not None:
            packed[:, : len(given)] = list(given)
        return packed

    return {
        "family": families.astype(np.uint8),
        "source": addresses(source, [192, 0, 2, 1]),
        "destination": addresses(destination, [198, 51, 100, 7]),
        "rtt_ms": rtts.astype(np.float32),
        "time_kind": times.astype(np.uint8),
        "time_value": values.astype(np.int64),
        "order": orders.astype(np.uint8),
    }


def tokens_of(**columns: Any) -> list[int]:
    return encode(**make(**columns))[0].tolist()


def joined(parts: list[list[int]]) -> list[int]:
    return [token for part in parts for token in part]


# Vocabulary and sizes


def test_the_vocabulary_is_the_one_of_the_design() -> None:
    assert {role.name: int(role) for role in Role} == {
        "MEASUREMENT_START": 0,
        "SRC_IPV4": 1,
        "SRC_IPV6": 2,
        "DST_IPV4": 3,
        "DST_IPV6": 4,
        "TIMESTAMP_ABS": 5,
        "TIMESTAMP_DELTA1": 6,
        "TIMESTAMP_DELTA4": 7,
        "RTT_START": 8,
        "THROUGHPUT_START": 9,
        "FAILED": 10,
    }
    assert (FIRST_BYTE, VOCABULARY_SIZE) == (11, 267)
    assert {role.name: count for role, count in BYTES_AFTER.items()} == {
        "SRC_IPV4": 4,
        "SRC_IPV6": 16,
        "DST_IPV4": 4,
        "DST_IPV6": 16,
        "TIMESTAMP_ABS": 8,
        "TIMESTAMP_DELTA1": 1,
        "TIMESTAMP_DELTA4": 4,
        "RTT_START": 2,
        "FAILED": 0,
    }


@pytest.mark.parametrize(("family", "more"), [(4, 0), (6, 24)])
@pytest.mark.parametrize(
    ("time", "count"), [(TimeKind.ABSOLUTE, 23), (TimeKind.DELTA1, 16), (TimeKind.DELTA4, 19), (TimeKind.NONE, 14)]
)
def test_a_measurement_takes_as_many_tokens_as_promised(family: int, more: int, time: TimeKind, count: int) -> None:
    for order in range(24):
        assert len(tokens_of(family=family, time=time, order=order)) == count + more
        assert len(tokens_of(family=family, time=time, order=order, rtt_ms=np.nan)) == count + more - 2
    assert token_counts(family, False, time) == count + more
    assert token_counts(family, True, time) == count + more - 2


def test_the_field_orders_are_all_24_and_an_untimed_measurement_has_each_of_its_6_in_4_of_them() -> None:
    timed = [decode(tokens_of(order=order, time=TimeKind.DELTA1)).measurements[0].order for order in range(24)]
    untimed = [decode(tokens_of(order=order)).measurements[0].order for order in range(24)]
    assert set(timed) == set(permutations(("source", "destination", "result", "time")))
    assert Counter(untimed) == dict.fromkeys(permutations(("source", "destination", "result")), 4)


# The vectorised encoder against the reference


def random_rtts(rng: np.random.Generator, count: int) -> npt.NDArray[np.float32]:
    """From far below a microsecond to the longest, usual ones, exact ties and their float32 neighbours, failures."""
    extreme = np.exp(rng.uniform(np.log(1e-6), np.log(4.39e9), count))
    usual = rng.lognormal(4, 1, count)
    ties = rng.integers(1, 2**14, count) * 2.0 ** rng.integers(-4, 12, count)  # many are halfway between two codes
    rtts = np.choose(rng.integers(0, 3, count), [extreme, usual, ties]).astype(np.float32)
    beside = np.nextafter(rtts, np.where(rng.random(count) < 0.5, 0, np.inf).astype(np.float32))
    rtts = np.where(rng.random(count) < 0.3, beside, rtts)
    return np.where(rng.random(count) < 0.1, np.float32(np.nan), rtts)


def random_measurements(rng: np.random.Generator, count: int) -> Columns:
    kind = rng.integers(0, 4, count)
    absolute = np.where(rng.random(count) < 0.5, rng.integers(0, 2**32, count), rng.integers(-(2**63), 2**63, count))
    short, long = rng.integers(0, 256, count), rng.integers(0, 2**32, count) >> rng.integers(0, 24, count)
    family = rng.choice(np.array([4, 6], dtype=np.uint8), count)
    source, destination = rng.integers(0, 256, (2, count, 16), dtype=np.uint8)
    return {
        "family": family,
        "source": source,
        "destination": destination,
        "rtt_ms": random_rtts(rng, count),
        "time_kind": kind.astype(np.uint8),
        "time_value": np.choose(kind, [short, absolute, short, long]),
        "order": rng.integers(0, 24, count, dtype=np.uint8),
    }


def reference_tokens(measurements: Columns) -> list[list[int]]:
    kinds = [kind.name.lower() for kind in TimeKind]
    return [
        encode_one(
            family,
            source[: ADDRESS_BYTES[family]],
            destination[: ADDRESS_BYTES[family]],
            None if rtt != rtt else rtt,
            kinds[kind],
            value,
            FIELD_ORDERS[order],
        )
        for family, source, destination, rtt, kind, value, order in zip(
            measurements["family"].tolist(),
            [row.tobytes() for row in measurements["source"]],
            [row.tobytes() for row in measurements["destination"]],
            *(measurements[name].tolist() for name in ("rtt_ms", "time_kind", "time_value", "order")),
            strict=True,
        )
    ]


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 21), marks=pytest.mark.slow)], ids=str)
def test_the_compiled_encoder_agrees_with_the_reference_on_a_million_random_measurements(seeds: range) -> None:
    for seed in seeds:
        measurements = random_measurements(np.random.default_rng(seed), 50_000)
        tokens, lengths = encode(**measurements)
        expected = reference_tokens(measurements)
        assert lengths.tolist() == [len(one) for one in expected]
        assert tokens.dtype == np.uint16
        np.testing.assert_array_equal(tokens, joined(expected))


def test_no_measurements_are_no_tokens() -> None:
    tokens, lengths = encode(**random_measurements(np.random.default_rng(0), 0))
    assert tokens.size == lengths.size == 0


# RTT codes


def test_an_rtt_changes_by_at_most_half_a_microsecond_below_1024_us_and_one_part_in_2048_above() -> None:
    short = np.linspace(0.001, 1.024, 200_001)
    assert np.abs(decode_rtt(encode_rtt(short)) - short).max() <= 0.0005 * (1 + 1e-9)
    long = np.geomspace(1.024, 4.396e9, 1_000_001)
    assert np.abs(decode_rtt(encode_rtt(long)) / long - 1).max() <= 2**-11 * (1 + 1e-9)


def test_every_code_ends_halfway_to_the_next() -> None:
    codes = CODES
    values = decode_rtt(codes)
    halfway = (values[:-1] + values[1:]) / 2
    np.testing.assert_array_equal(encode_rtt(halfway * (1 - 1e-9)), codes[:-1])
    np.testing.assert_array_equal(encode_rtt(halfway * (1 + 1e-9)), codes[1:])


def test_codes_are_ordered_like_the_rtts() -> None:
    sweep = np.geomspace(1e-4, 4.396e9, 2_000_001)
    boundary = 2047.5 * 2.0 ** np.arange(31) / 1000  # where the exponent changes
    around = (boundary[:, None] * (1 + np.linspace(-1e-3, 1e-3, 2001))).ravel()
    for rtts in (sweep, around):
        assert (np.diff(encode_rtt(np.sort(rtts)).astype(int)) >= 0).all()


def test_halfway_between_two_codes_the_even_one_is_taken() -> None:
    halfway = {0.0625: 62, 0.1875: 188, 2.125: 1 << 11 | 1062, 2.375: 1 << 11 | 1188}  # 62.5, 187.5, 2 · 1062.5 µs …
    for rtt_ms, code in halfway.items():
        assert rtt_code(rtt_ms) == encode_rtt(rtt_ms) == code


def test_normalised_codes_are_complete_ordered_and_encode_to_themselves() -> None:
    codes = CODES
    values = decode_rtt(codes)
    assert len(codes) == 2047 + 31 * 1024
    assert (np.diff(codes.astype(int)) > 0).all()
    assert (np.diff(values) > 0).all()
    np.testing.assert_array_equal(encode_rtt(values), codes)
    assert set(values) == set(decode_rtt(np.arange(1, 2**16))) - {0.0}  # the other codes have no value of their own


def test_the_extremes_of_the_rtt_code() -> None:
    assert encode_rtt([0.0, 1e-30, 0.001, 0.00149]).tolist() == [1, 1, 1, 1]
    assert encode_rtt([np.nan]).tolist() == [0]
    assert encode_rtt(decode_rtt(0xFFFF)) == 0xFFFF
    for endless in (4.4e9, np.inf):
        with pytest.raises(OverflowError):
            encode_rtt(np.array([1.0, np.nan, endless]))


# Decoding what was encoded


@st.composite
def drawn_measurement(draw: st.DrawFn) -> dict[str, Any]:
    family = draw(st.sampled_from([4, 6]))
    address = st.binary(min_size=ADDRESS_BYTES[family], max_size=ADDRESS_BYTES[family])
    kind = draw(st.sampled_from(TimeKind))
    return {
        "family": family,
        "source": draw(address),
        "destination": draw(address),
        "rtt_ms": draw(st.none() | st.floats(0, 2.0**32, width=32)),
        "time": kind,
        "value": draw(st.integers(SMALLEST[kind], LARGEST[kind])),
        "order": draw(st.integers(0, 23)),
    }


@settings(max_examples=300, deadline=None)
@given(st.lists(drawn_measurement(), max_size=8))
def test_decoding_gives_back_what_was_encoded(drawn: list[dict[str, Any]]) -> None:
    parts = [tokens_of(**one | {"rtt_ms": np.nan if one["rtt_ms"] is None else one["rtt_ms"]}) for one in drawn]
    decoded = decode(joined(parts))
    assert (decoded.truncated, decoded.problem) == (0, None)
    assert decoded.end == sum(map(len, parts))
    start = 0
    for one, part, back in zip(drawn, parts, decoded.measurements, strict=True):
        assert (back.start, back.length) == (start, len(part))
        assert back.family == one["family"]
        assert back.source == format_address(one["family"], one["source"])
        assert back.destination == format_address(one["family"], one["destination"])
        assert back.failed == (one["rtt_ms"] is None)
        assert back.rtt_code == (None if back.failed else rtt_code(one["rtt_ms"]))
        assert back.rtt_ms == (None if back.rtt_code is None else decode_rtt(back.rtt_code))
        assert back.time_kind is one["time"]
        timed = back.time_kind is not TimeKind.NONE
        assert back.time_value == (one["value"] if timed else None)
        assert back.order == tuple(name for name in FIELD_ORDERS[one["order"]] if timed or name != "time")
        start += len(part)


def test_a_delta_counts_from_the_previous_measurement_that_has_a_time() -> None:
    absolute, short, long, none = TimeKind.ABSOLUTE, TimeKind.DELTA1, TimeKind.DELTA4, TimeKind.NONE
    kinds = [short, none, absolute, short, none, long, short]
    values = [5, 0, NOON, 60, 0, 1000, 0]
    decoded = decode(tokens_of(time=kinds, value=values))
    assert decoded.problem is None
    times = [one.time_s for one in decoded.measurements]
    assert times == [None, None, NOON, NOON + 60, None, NOON + 1060, NOON + 1060]


@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.int32, np.int64, np.uint64, ">i4", object])
def test_any_integer_type_can_be_decoded(dtype: Any) -> None:
    tokens = tokens_of(family=[4, 6], time=TimeKind.ABSOLUTE, value=NOON)
    assert decode(np.array(tokens, dtype=dtype)) == decode(tokens) == decode(tuple(tokens))
    assert len(decode(tokens).measurements) == 2


def test_nothing_decodes_to_nothing() -> None:
    assert decode([]) == decode(np.array([])) == Decoded(measurements=())


# Tails and faults


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("time", TimeKind)
def test_a_tail_cut_anywhere_is_tolerated_and_its_tokens_are_counted(family: int, time: TimeKind) -> None:
    for order in range(24):
        first, second = (tokens_of(family=family, time=time, value=9, order=order) for _ in range(2))
        # Without its last field, a measurement that ends in a time is a whole measurement without a time.
        timed_last = time is not TimeKind.NONE and FIELD_ORDERS[order][-1] == "time"
        whole_too = len(tokens_of(family=family)) if timed_last else None
        for cut in range(len(second) + 1):
            decoded = decode(first + second[:cut])
            complete = cut in (len(second), whole_too)
            assert decoded.problem is None
            assert len(decoded.measurements) == 1 + complete
            assert decoded.truncated == (0 if complete else cut)
            assert decoded.end + decoded.truncated == len(first) + cut


START, SRC4, DST4, DST6, RTT, FAIL = 0, 1, 3, 4, 8, 10
SOURCE, DESTINATION, RESULT = [SRC4, 11, 11, 11, 11], [DST4, 12, 12, 12, 12], [RTT, 13, 14]
WHOLE = [START, *SOURCE, *DESTINATION, *RESULT]
FAULTS: list[tuple[Fault, list[int], int, str, str]] = [
    # What is wrong, the measurement that has it, where in it, what is found there, what is expected.
    (Fault.UNKNOWN_TOKEN, [*WHOLE, 267], 14, "id 267", "a time or MEASUREMENT_START"),
    (Fault.UNKNOWN_TOKEN, [START, SRC4, 11, -1], 3, "id -1", "byte 2 of the 4 after SRC_IPV4"),
    (Fault.RESERVED_TOKEN, [START, *SOURCE, 9], 6, "THROUGHPUT_START", "a destination, a result or a time"),
    (Fault.BYTE_FOR_ROLE, [START, 11 + 7], 1, "byte 7", "a source, a destination, a result or a time"),
    (Fault.BYTE_FOR_ROLE, [*WHOLE, 266], 14, "byte 255", "a time or MEASUREMENT_START"),
    (Fault.BYTE_FOR_ROLE, [*WHOLE, 6, 11, 11], 16, "byte 0", "MEASUREMENT_START"),
    (Fault.ROLE_FOR_BYTE, [START, *SOURCE[:-1], *DESTINATION], 5, "DST_IPV4", "byte 4 of the 4 after SRC_IPV4"),
    (Fault.ROLE_FOR_BYTE, [START, RTT, 11, START], 3, "MEASUREMENT_START", "byte 2 of the 2 after RTT_START"),
    (Fault.REPEATED_FIELD, [START, *SOURCE, *SOURCE], 6, "SRC_IPV4", "a destination, a result or a time"),
    (Fault.REPEATED_FIELD, [START, FAIL, *RESULT], 2, "RTT_START", "a source, a destination or a time"),
    (Fault.REPEATED_FIELD, [*WHOLE, 6, 11, 5], 16, "TIMESTAMP_ABS", "MEASUREMENT_START"),
    (Fault.MISSING_FIELD, [START, *DESTINATION, *RESULT, *WHOLE], 9, "MEASUREMENT_START", "a source or a time"),
    (Fault.MISSING_FIELD, [START, *SOURCE, *RESULT, *WHOLE], 9, "MEASUREMENT_START", "a destination or a time"),
    (Fault.MISSING_FIELD, [START, *SOURCE, *DESTINATION, *WHOLE], 11, "MEASUREMENT_START", "a result or a time"),
    (Fault.FAMILY_MISMATCH, [START, FAIL, *SOURCE, DST6], 7, "DST_IPV6", "an IPv4 destination"),
    (Fault.FAMILY_MISMATCH, [START, DST6, *[11] * 16, SRC4], 18, "SRC_IPV4", "an IPv6 source"),
]


@pytest.mark.parametrize(("fault", "tokens", "position", "found", "expected"), FAULTS)
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("after", [[], WHOLE])
def test_a_fault_is_reported_with_its_position_and_what_came_before_is_kept(
    fault: Fault, tokens: list[int], position: int, found: str, expected: str, before: int, after: list[int]
) -> None:
    decoded = decode(WHOLE * before + tokens + after)
    position += before * len(WHOLE)
    assert len(decoded.measurements) == before
    assert decoded.truncated == 0
    assert decoded.problem is not None
    assert (decoded.problem.fault, decoded.problem.position) == (fault, position)
    assert (decoded.problem.found, decoded.problem.expected) == (found, expected)
    assert str(decoded.problem) == f"{fault} at token {position}: found {found}, expected {expected}"


@pytest.mark.parametrize("first", [SRC4, FAIL, 11, 200])
def test_tokens_before_the_first_measurement_are_a_fault(first: int) -> None:
    problem = decode([first, *WHOLE]).problem
    assert problem is not None
    assert (problem.fault, problem.position, problem.expected) == (Fault.BEFORE_START, 0, "MEASUREMENT_START")


def test_every_kind_of_fault_is_tested() -> None:
    assert {fault for fault, *_ in FAULTS} | {Fault.BEFORE_START} == set(Fault)


nearly_tokens = st.lists(st.integers(-1, 12) | st.sampled_from([266, 267]), max_size=60)
nearly_contexts = st.lists(st.sampled_from([[START], SOURCE, DESTINATION, RESULT, [FAIL], [6, 11], [11]]), max_size=20)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers()) | nearly_tokens | nearly_contexts.map(joined))
@example([-(2**63), 2**64])
@example([*WHOLE, 5, *[266] * 8])
@example([*WHOLE, 5, 11 + 127, *[266] * 7, *WHOLE, 7, *[266] * 4])
def test_any_integers_at_all_can_be_decoded_and_shown(tokens: list[int]) -> None:
    decoded = decode(tokens)
    assert sum(one.length for one in decoded.measurements) == decoded.end
    if decoded.problem is None:
        assert decoded.end + decoded.truncated == len(tokens)
    else:
        assert decoded.end <= decoded.problem.position < len(tokens)
        assert decode(tokens[: decoded.problem.position]).problem is None  # it is the first fault
    tail = bool(decoded.truncated or decoded.problem)
    lines = render(decoded).plain.splitlines()
    assert len(lines) == len(as_json(decoded)) == len(decoded.measurements) + tail
    json.dumps(as_json(decoded))


def test_what_is_not_a_row_of_integers_is_a_type_error() -> None:
    for wrong in ([0.5], np.array([0.0, 1.0]), np.zeros((2, 2), dtype=int), ["0"]):
        with pytest.raises(TypeError):
            decode(wrong)  # type: ignore[arg-type]


# What people see


def test_a_measurement_is_shown_on_a_line_with_its_fields_as_written() -> None:
    backwards = FIELD_ORDERS.index(("time", "result", "destination", "source"))
    kinds = [TimeKind.ABSOLUTE, TimeKind.DELTA1, TimeKind.NONE]
    tokens = tokens_of(
        family=[4, 6, 4], rtt_ms=[12.344, 12.0, np.nan], time=kinds, value=[NOON, 60, 0], order=[0, backwards, 0]
    )
    assert render(tokens).plain.splitlines() == [
        " 0  from 192.0.2.1  to 198.51.100.7  12.344 ms  at 2024-01-01 12:00:00 UTC",
        "23  +60s  12.000 ms  to 2001:db8::7  from 2001:db8::1",
        "63  from 192.0.2.1  to 198.51.100.7  failed",
    ]


def test_fields_have_colours_of_their_own_and_a_failure_is_red() -> None:
    text = render(decode(tokens_of(rtt_ms=[12.0, np.nan], time=TimeKind.DELTA1, value=60)))
    style_of = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    fields = ("from 192.0.2.1", "to 198.51.100.7", "12.000 ms", "+60s", "failed")
    assert len({style_of[field] for field in fields}) == len(fields)
    assert "red" in style_of["failed"]


def test_tails_are_marked_and_nothing_is_cut_off_in_a_narrow_pipe() -> None:
    console = Console(width=20, highlight=False)
    with console.capture() as capture:
        console.print(render([*WHOLE, START, SRC4]), soft_wrap=True)
        console.print(render([*WHOLE, START, START]), soft_wrap=True)
    whole, truncated, _, malformed = capture.get().splitlines()
    assert whole == " 0  from 0.0.0.0  to 1.1.1.1  0.515 ms"
    assert truncated == "14  ... truncated: 2 tokens of an incomplete measurement"
    assert malformed.startswith("14  !!! malformed: measurement without all its fields at token 15: found MEASUREMENT")


def test_json_has_a_dictionary_for_each_line() -> None:
    tokens = tokens_of(rtt_ms=[12.0, np.nan], time=[TimeKind.ABSOLUTE, TimeKind.DELTA1], value=[NOON, 60])
    first, second, tail = as_json(decode([*tokens, START, FAIL, 11]))
    assert first == {
        "kind": "measurement",
        "start": 0,
        "length": 23,
        "order": ["source", "destination", "result", "time"],
        "family": 4,
        "source": "192.0.2.1",
        "destination": "198.51.100.7",
        "failed": False,
        "rtt_ms": 12.0,
        "rtt_code": 3 << 11 | 1500,
        "time_kind": "absolute",
        "time_value": NOON,
        "time_s": NOON,
        "time": "2024-01-01T12:00:00+00:00",
    }
    assert (second["failed"], second["rtt_ms"], second["time"]) == (True, None, "2024-01-01T12:01:00+00:00")
    assert (tail["kind"], tail["start"], tail["position"]) == ("malformed", 37, 39)
    assert as_json(decode([START])) == [{"kind": "truncated", "start": 0, "length": 1}]


def test_the_examples_of_the_documentation_are_true() -> None:
    page = Path(__file__).parents[1] / "docs" / "tokens.md"
    results = doctest.testfile(str(page), module_relative=False)
    assert results.attempted > 0
    assert results.failed == 0
