"""Beam search, ranked candidates and NLL of measurements, against the plain transformer on every sequence."""

from collections.abc import Sequence
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from language_model_fixtures import (
    DESTINATION_LAST,
    LENGTH,
    RESULT_LAST,
    SOURCES,
    START_S,
    TARGETS,
    plain,
    random_row,
    small_world,
    trained,
    untrained,
    written,
)
from ping_llm.core.errors import PingLlmError
from ping_llm.predict.language_model import LanguageModel
from ping_llm.predict.prompts import TokenOffsets
from ping_llm.predict.scoring import (
    FieldBits,
    destinations,
    field_order_likelihoods,
    parse_prefix,
    rank,
    score_rows,
)
from ping_llm.rows.format import ProbeRow
from ping_llm.tokens import FIELD_ORDERS


def question(
    row: ProbeRow | None, rtt_ms: float | None, time_s: int | None, family: int = 4
) -> tuple[list[int], list[list[int]]]:
    """Tokens up to the role of the destination, and those of each measurement of the history, oldest first."""
    order = RESULT_LAST if rtt_ms is None else DESTINATION_LAST
    source = ip_address(SOURCES[family]).packed
    rtt = np.nan if rtt_ms is None else rtt_ms
    width = len(source)
    known = row or random_row(0, family)
    asked = ProbeRow(
        family=family,
        source=source,
        time_us=np.append(known.time_us, (time_s or 0) * 1_000_000),
        destinations=np.append(known.destinations, np.zeros((1, width), np.uint8), axis=0),
        rtt_ms=np.append(known.rtt_ms, np.float32(rtt)),
    )
    stop = len(known) if time_s is None else int(np.sum(known.time_us < time_s * 1_000_000))
    chosen = [*range(stop), len(known)]
    while sum(map(len, spelled := written(asked, chosen, timed=time_s is not None, order=order))) > LENGTH:
        chosen = chosen[1:]
    *history, last = spelled
    return last[: len(last) - width - (rtt_ms is None)], history


def enumerated(start: list[int], beginnings: Sequence[bytes]) -> npt.NDArray[np.float64]:
    """Log-probability of every last byte after each of these beginnings of an address: [beginnings, 256]."""
    logs = plain([[*start, *(11 + byte for byte in beginning)] for beginning in beginnings])[..., 11:]
    logs -= np.logaddexp.reduce(logs, axis=-1, keepdims=True)
    found = np.zeros((len(beginnings), 256))
    for n, beginning in enumerate(beginnings):
        steps = range(len(start) - 1, len(start) - 1 + len(beginning))
        found[n] = logs[n, steps[-1] + 1] + sum(logs[n, at, byte] for at, byte in zip(steps, beginning, strict=True))
    return found


def start_of(*asked: Any) -> list[int]:
    last, history = question(*asked)
    return [token for measurement in (*history, last) for token in measurement]


ASKED = [
    pytest.param(None, 20.0, None, 4, id="no history, no time"),
    pytest.param(None, None, START_S, 6, id="no history, IPv6"),
    pytest.param(random_row(5), 20.0, START_S + 50_000, 4, id="timed"),
    pytest.param(random_row(5), np.nan, None, 4, id="failed"),
    pytest.param(random_row(6, 6), None, START_S + 50_000, 6, id="any result, IPv6"),
    pytest.param(random_row(90), 300.0, START_S + 400_000, 4, id="history longer than the context"),
    pytest.param(random_row(90), 0.5, None, 4, id="longer, without times"),
    pytest.param(random_row(9), 20.0, START_S + 300, 4, id="some of the history is later"),
]


@pytest.mark.slow
class TestWhatWasLearned:
    @pytest.mark.parametrize(("address", "rtt_ms"), TARGETS.items())
    def test_the_destination_at_this_distance_comes_first(self, address: str, rtt_ms: float) -> None:
        found = destinations(trained(), SOURCES[4], rtt_ms, history=small_world(5, seed=999), beam=20)
        assert found.addresses[0] == address
        assert found.probability[0] > 0.5
        assert found.covered > 0.97

    def test_an_address_is_completed_to_those_that_are_measured(self) -> None:
        found = destinations(trained(), SOURCES[4], None, prefix="10.", history=small_world(5, seed=999), beam=20)
        assert set(found.addresses[:2]) == {"10.1.1.1", "10.7.7.7"}
        assert found.probability[:2].sum() > 0.9


class TestDestinations:
    @pytest.mark.parametrize(("row", "rtt_ms", "time_s", "family"), [ASKED[1], ASKED[2]])
    def test_a_beam_as_wide_as_what_is_left_open_finds_what_enumeration_finds(
        self, row: ProbeRow | None, rtt_ms: float | None, time_s: int | None, family: int
    ) -> None:
        text = {4: "193.0.", 6: "2001:67c:0:0:0:0:0:"}[family]
        prefix = parse_prefix(text, family)
        logs = enumerated(
            start_of(row, rtt_ms, time_s, family), [prefix + bytes([byte]) for byte in range(256)]
        ).reshape(-1)
        logs -= np.logaddexp.reduce(logs)  # given the prefix
        best = np.argsort(-logs)[:300]
        found = destinations(
            untrained(), SOURCES[family], rtt_ms, history=row, time_s=time_s, count=300, beam=256, prefix=text
        )
        np.testing.assert_allclose(np.log(found.probability), logs[best], atol=1e-4)
        assert found.covered == pytest.approx(1, abs=1e-5)
        likelihood = dict(zip(found.addresses, np.log(found.probability).tolist(), strict=True))
        assert len(likelihood) == 300
        for address, value in likelihood.items():
            assert value == pytest.approx(logs[int.from_bytes(ip_address(address).packed[-2:], "big")], abs=1e-4)

    @pytest.mark.slow
    @pytest.mark.parametrize(("family", "beam"), [(4, 20), (6, 3)])
    def test_a_narrow_beam_gives_exact_probabilities_and_says_what_it_missed(self, family: int, beam: int) -> None:
        model, source = untrained(), SOURCES[family]
        found = destinations(model, source, 20.0, history=random_row(5, family), count=12, beam=beam)
        again = rank(model, source, found.addresses, 20.0, history=random_row(5, family))
        np.testing.assert_allclose(np.log(found.probability), again, atol=1e-4)
        assert np.all(np.diff(found.probability) <= 0)
        assert found.probability.sum() <= found.covered < 1
        assert len(set(found.addresses)) == 12

    def test_no_missed_address_is_likelier_than_what_is_not_covered(self) -> None:
        prefix = bytes([193, 0])
        found = destinations(untrained(), SOURCES[4], 20.0, count=2000, beam=7, prefix="193.0.")
        logs = enumerated(start_of(None, 20.0, None, 4), [prefix + bytes([byte]) for byte in range(256)]).reshape(-1)
        probability = np.exp(logs - np.logaddexp.reduce(logs))
        looked_at = {ip_address(address).packed[2] for address in found.addresses}
        assert len(looked_at) == 7
        missed = np.concatenate([probability[byte << 8 : (byte + 1) << 8] for byte in set(range(256)) - looked_at])
        assert missed.sum() == pytest.approx(1 - found.covered, abs=1e-4)
        assert missed.max() < 1 - found.covered

    def test_what_was_measured_from_the_asked_time_on_is_not_seen(self) -> None:
        row = random_row(9)
        time_s = int(row.time_us[6]) // 1_000_000
        before = int(np.sum(row.time_us < row.time_us[6]))
        cut = ProbeRow(
            family=4,
            source=row.source,
            time_us=row.time_us[:before],
            destinations=row.destinations[:before],
            rtt_ms=row.rtt_ms[:before],
        )

        def found(history: ProbeRow, time_s: int | None) -> tuple[str, ...]:
            return destinations(untrained(), SOURCES[4], 20.0, history=history, time_s=time_s, beam=20).addresses

        assert found(row, time_s) == found(cut, time_s)
        assert found(row, time_s) != found(row, None)

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            ({"source": "192.0.2.300"}, "'192.0.2.300' is neither an address nor a name"),
            ({"source": ""}, "'' is neither an address nor a name"),
            ({"source": "192.0.2.9", "history": random_row(3)}, "history is of 192.0.2.1, the question of 192.0.2.9"),
            ({"rtt_ms": -1.0}, "RTT of -1.0 ms"),
            ({"rtt_ms": np.inf}, "RTT of inf ms"),
            ({"time_s": np.nan}, "nan is not a time"),
            ({"time_s": -5}, "-5 is not a time"),
            ({"count": 0}, "count=0"),
            ({"beam": 0}, "beam=0"),
            ({"prefix": "193.0.14.129"}, "193.0.14.129 is a whole address"),
        ],
    )
    def test_a_question_that_makes_no_sense_is_refused(self, asked: dict[str, Any], message: str) -> None:
        with pytest.raises(PingLlmError, match=message):
            destinations(untrained(), **{"source": SOURCES[4], "rtt_ms": 20.0, **asked})


class TestRank:
    @pytest.mark.parametrize(("row", "rtt_ms", "time_s", "family"), ASKED)
    def test_gives_the_sum_of_log_probabilities_of_the_plain_transformer(
        self, row: ProbeRow | None, rtt_ms: float | None, time_s: int | None, family: int
    ) -> None:
        kind = IPv4Address if family == 4 else IPv6Address
        random = np.random.default_rng(1)
        packed = [random.bytes(4 if family == 4 else 16) for _ in range(8)]
        logs = enumerated(start_of(row, rtt_ms, time_s, family), [address[:-1] for address in packed])
        found = rank(untrained(), SOURCES[family], [str(kind(a)) for a in packed], rtt_ms, history=row, time_s=time_s)
        np.testing.assert_allclose(found, [of[a[-1]] for of, a in zip(logs, packed, strict=True)], atol=1e-4)

    @given(st.permutations(range(8)), st.sampled_from([0, 5, 8]))
    @settings(max_examples=20, deadline=None)
    def test_candidates_do_not_influence_each_other(self, order: list[int], count: int) -> None:
        candidates = [f"10.{n % 3}.{n % 7}.{n}" for n in range(8)]
        together = rank(untrained(), SOURCES[4], candidates, 20.0)
        chosen = order[:count]
        found = rank(untrained(), SOURCES[4], [candidates[n] for n in chosen], 20.0)
        np.testing.assert_allclose(found, together[chosen], atol=1e-5)

    def test_takes_more_candidates_than_are_read_at_once(self) -> None:
        candidates = [f"10.{n % 3}.{n % 7}.{n}" for n in range(21)]
        together = rank(untrained(), SOURCES[4], candidates, 20.0)
        np.testing.assert_allclose(rank(untrained(), SOURCES[4], candidates, 20.0, per_call=8), together, atol=1e-5)
        assert 0 < np.exp(together).sum() < 1

    @pytest.mark.parametrize(
        ("candidate", "message"),
        [("2001:db8::7", "2001:db8::7 is of another family than 192.0.2.1"), ("x", "x is of another family")],
    )
    def test_a_bad_candidate_is_named(self, candidate: str, message: str) -> None:
        with pytest.raises(PingLlmError, match=message):
            rank(untrained(), SOURCES[4], ["10.0.0.1", candidate], 20.0)


class TestComplete:
    @pytest.mark.parametrize(("family", "prefix", "rtt_ms"), [(4, "193.0.", None), (6, "2001:67c:", 20.0)])
    def test_finds_the_likeliest_addresses_that_begin_so(self, family: int, prefix: str, rtt_ms: float | None) -> None:
        history = random_row(4, family)
        found = destinations(untrained(), SOURCES[family], rtt_ms, history=history, prefix=prefix, count=3, beam=4)
        assert all(address.startswith(prefix) for address in found.addresses)
        logs = rank(untrained(), SOURCES[family], found.addresses, rtt_ms, history=history)
        np.testing.assert_allclose(np.diff(np.log(found.probability)), np.diff(logs), atol=1e-4)

    @given(st.ip_addresses(v=4) | st.ip_addresses(v=6), st.integers(0, 8), st.booleans())
    def test_any_number_of_whole_parts_is_a_prefix(
        self, address: IPv4Address | IPv6Address, count: int, closed: bool
    ) -> None:
        sign, most, width = (".", 4, 1) if address.version == 4 else (":", 8, 2)
        parts = address.exploded.split(sign)[: min(count, most)]
        text = sign.join(parts) + (sign if closed and 0 < len(parts) < most else "")
        assert parse_prefix(text, address.version) == address.packed[: len(parts) * width]

    @pytest.mark.parametrize(
        ("family", "text", "message"),
        [
            (4, "193.256.", "'256' is no part of one"),
            (4, "193..1", "'' is no part of one"),
            (4, ".", "'' is no part of one"),
            (4, "a.b", "'a' is no part of one"),
            (4, "193.+1", r"'\+1' is no part of one"),
            (4, "193.007.", "'007' is no part of one"),
            (4, "2001:67c:", "'2001:67c:' is no part of one"),
            (4, "193.0.0.0/16", "'0/16' is no part of one"),
            (4, "1.2.3.4.5", "has 5 parts"),
            (6, "193.0.", "'193.0.' is no part of one"),
            (6, "2001:12345:", "'12345' is no part of one"),
            (6, "2001:67c::", "write the zeros"),
            (6, "1:2:3:4:5:6:7:8:9", "has 9 parts"),
        ],
    )
    def test_what_is_no_prefix_is_refused(self, family: int, text: str, message: str) -> None:
        with pytest.raises(PingLlmError, match=message):
            parse_prefix(text, family)


# --- bits of measurements

FIELDS = ("start", "time", "source", "destination", "result")
_FIELD_OF_ROLE = {0: 0, 1: 2, 2: 2, 3: 3, 4: 3, 5: 1, 6: 1, 7: 1, 8: 4, 10: 4}


def slowly(row: ProbeRow, *, timed: bool) -> np.ndarray:
    """Bits of each field of each measurement, token by token: [measurements, fields]."""
    bits = np.zeros((len(row), len(FIELDS)))
    for first, scored, stop in TokenOffsets.of(row, timed=timed).windows(LENGTH):
        spelled = written(row, range(first, stop), timed=timed, order=RESULT_LAST)
        logs = plain([[token for tokens in spelled for token in tokens]])[0]
        at, field = 0, 0
        for measurement, tokens in zip(range(first, stop), spelled, strict=True):
            for token in tokens:
                field = _FIELD_OF_ROLE.get(token, field)
                if at > 0 and measurement >= scored:
                    bits[measurement, field] -= logs[at - 1, token] / np.log(2)
                at += 1
    return bits


def bits_of(row: ProbeRow, *, timed: bool = True, model: LanguageModel | None = None) -> FieldBits:
    return score_rows(model or untrained(), [row], timed=timed)[0]


def table(found: FieldBits) -> np.ndarray:
    return np.stack([getattr(found, field) for field in FIELDS], axis=1)


class TestBits:
    @pytest.mark.parametrize("timed", [True, False])
    @pytest.mark.parametrize(("count", "family"), [(1, 4), (5, 4), (60, 4), (30, 6)])
    def test_is_the_cross_entropy_of_the_plain_transformer(self, count: int, family: int, timed: bool) -> None:
        row = random_row(count, family)
        found = bits_of(row, timed=timed)
        np.testing.assert_allclose(table(found), slowly(row, timed=timed), atol=1e-3)
        np.testing.assert_allclose(found.total, table(found).sum(axis=1))
        assert found.start[0] == 0
        assert timed or not found.time.any()

    def test_rows_do_not_influence_each_other(self) -> None:
        rows = [random_row(count, family, seed=count) for count, family in [(3, 4), (60, 4), (0, 4), (9, 6), (25, 6)]]
        alone = [table(bits_of(row)) for row in rows]
        for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
            together = score_rows(untrained(), [rows[number] for number in order])
            for number, found in zip(order, together, strict=True):
                np.testing.assert_allclose(table(found), alone[number], atol=1e-3)

    def test_does_not_depend_on_what_comes_later(self) -> None:
        row = random_row(60)
        later = random_row(60, seed=1)
        changed = ProbeRow(
            family=4,
            source=row.source,
            time_us=np.where(np.arange(60) < 41, row.time_us, row.time_us[40] + later.time_us - later.time_us[40]),
            destinations=np.where(np.arange(60)[:, None] < 41, row.destinations, later.destinations),
            rtt_ms=np.where(np.arange(60) < 41, row.rtt_ms, later.rtt_ms),
        )
        before, after = table(bits_of(row)), table(bits_of(changed))
        np.testing.assert_allclose(before[:41], after[:41], atol=1e-3)
        assert not np.allclose(before[41:], after[41:], atol=0.1)

    def test_a_result_that_does_not_fit_its_destination_stands_out(self) -> None:
        row = small_world(40, seed=999)
        rtt = row.rtt_ms.copy()
        rtt[25] = 5.0 if rtt[25] > 100 else 200.0
        found = bits_of(replace(row, rtt_ms=rtt), timed=False, model=trained())
        assert int(np.argmax(found.result)) == 25
        assert found.result[25] > np.median(found.result) + 2

    def test_nothing_measured_has_no_bits(self) -> None:
        assert len(bits_of(random_row(0)).result) == 0
        assert score_rows(untrained(), []) == []

    @given(st.integers(0, 200), st.sampled_from([4, 6]), st.booleans(), st.integers(64, 300), st.integers(0, 99))
    @settings(deadline=None)
    def test_windows_fit_the_context_and_leave_half_of_it_for_what_came_before(
        self, count: int, family: int, timed: bool, length: int, seed: int
    ) -> None:
        row = random_row(count, family, seed)
        windows = TokenOffsets.of(row, timed=timed).windows(length)
        assert [scored for _, scored, _ in windows] == [0, *(stop for _, _, stop in windows)][: len(windows)]
        assert (windows[-1][2] if windows else 0) == count
        for first, scored, stop in windows:
            sizes = [len(tokens) for tokens in written(row, range(first, stop), timed=timed, order=RESULT_LAST)]
            assert sum(sizes) <= length
            is_full = sum(sizes) + 47 > length
            assert is_full or stop == count
            history = sum(sizes[: scored - first])
            longer = sum(map(len, written(row, range(max(first - 1, 0), scored + 1), timed=timed, order=RESULT_LAST)))
            assert history >= length // 2 or first == 0 or longer > length


class TestFieldOrders:
    @pytest.mark.parametrize("timed", [True, False])
    @pytest.mark.parametrize(("index", "family"), [(0, 4), (70, 4), (20, 6)])
    def test_each_order_has_the_likelihood_that_the_plain_transformer_gives_its_tokens(
        self, index: int, family: int, timed: bool
    ) -> None:
        row = random_row(80, family)
        found = field_order_likelihoods(untrained(), row, index, timed=timed)
        assert len(found.orders) == len(set(found.orders)) == (24 if timed else 6)
        assert set(found.orders) == {tuple(f for f in order if timed or f != "time") for order in FIELD_ORDERS}
        chosen = range(index + 1)
        while sum(map(len, written(row, chosen, timed=timed, order=RESULT_LAST))) > LENGTH:
            chosen = chosen[1:]
        history = [t for tokens in written(row, chosen, timed=timed, order=RESULT_LAST)[:-1] for t in tokens]
        asked = [written(row, chosen, timed=timed, order=order)[-1] for order in found.orders]
        logs = plain([[*history, *tokens] for tokens in asked])
        for of_order, tokens, likelihood in zip(logs, asked, found.log_likelihood.tolist(), strict=True):
            places = range(len(history), len(history) + len(tokens) - 1)
            expected = sum(of_order[at, token] for at, token in zip(places, tokens[1:], strict=True))
            assert likelihood == pytest.approx(expected, abs=1e-3)
        assert np.exp(found.marginal - found.log_likelihood.max()) == pytest.approx(
            np.exp(found.log_likelihood - found.log_likelihood.max()).sum()
        )
        assert found.log_likelihood.min() <= found.mean <= found.log_likelihood.max() <= found.marginal

    @pytest.mark.parametrize("index", [-1, 5])
    def test_a_measurement_that_is_not_there_is_refused(self, index: int) -> None:
        with pytest.raises(PingLlmError, match=f"no measurement {index} in a row of 5"):
            field_order_likelihoods(untrained(), random_row(5), index)
