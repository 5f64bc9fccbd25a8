"""Surprise of measurements and likelihood of field orders, against the plain transformer on every sequence."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ping_llm.core.errors import PingLlmError
from ping_llm.predict.scoring import Room, Surprise, _edges, field_order_likelihoods, surprise, surprises
from ping_llm.rows.format import ProbeRow
from ping_llm.tokens import FIELD_ORDERS
from test_predict_addresses import LENGTH, RESULT_LAST, plain, random_row, small_world, trained, untrained, written

FIELDS = ("start", "time", "source", "destination", "result")
_FIELD_OF_ROLE = {0: 0, 1: 2, 2: 2, 3: 3, 4: 3, 5: 1, 6: 1, 7: 1, 8: 4, 10: 4}


def slowly(row: ProbeRow, *, timed: bool) -> np.ndarray:
    """Bits of each field of each measurement, token by token: [measurements, fields]."""
    bits = np.zeros((len(row), len(FIELDS)))
    for first, scored, stop in _edges(Room.of(row, timed=timed), LENGTH):
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


def table(found: Surprise) -> np.ndarray:
    return np.stack([getattr(found, field) for field in FIELDS], axis=1)


class TestSurprise:
    @pytest.mark.parametrize("timed", [True, False])
    @pytest.mark.parametrize(("count", "family"), [(1, 4), (5, 4), (60, 4), (30, 6)])
    def test_is_the_cross_entropy_of_the_plain_transformer(self, count: int, family: int, timed: bool) -> None:
        row = random_row(count, family)
        found = surprise(untrained(), row, timed=timed)
        np.testing.assert_allclose(table(found), slowly(row, timed=timed), atol=1e-3)
        np.testing.assert_allclose(found.total, table(found).sum(axis=1))
        assert found.start[0] == 0
        assert timed or not found.time.any()

    def test_rows_do_not_influence_each_other(self) -> None:
        rows = [random_row(count, family, seed=count) for count, family in [(3, 4), (60, 4), (0, 4), (9, 6), (25, 6)]]
        alone = [table(surprise(untrained(), row)) for row in rows]
        for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
            together = surprises(untrained(), [rows[number] for number in order])
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
        before, after = table(surprise(untrained(), row)), table(surprise(untrained(), changed))
        np.testing.assert_allclose(before[:41], after[:41], atol=1e-3)
        assert not np.allclose(before[41:], after[41:], atol=0.1)

    def test_a_result_that_does_not_fit_its_destination_stands_out(self) -> None:
        row = small_world(40, seed=999)
        rtt = row.rtt_ms.copy()
        rtt[25] = 5.0 if rtt[25] > 100 else 200.0
        found = surprise(trained(), replace(row, rtt_ms=rtt), timed=False)
        assert int(np.argmax(found.result)) == 25
        assert found.result[25] > np.median(found.result) + 2

    def test_nothing_measured_is_no_surprise(self) -> None:
        assert len(surprise(untrained(), random_row(0))) == 0
        assert surprises(untrained(), []) == []

    @given(st.integers(0, 200), st.sampled_from([4, 6]), st.booleans(), st.integers(64, 300), st.integers(0, 99))
    @settings(deadline=None)
    def test_windows_fit_the_context_and_leave_half_of_it_for_what_came_before(
        self, count: int, family: int, timed: bool, length: int, seed: int
    ) -> None:
        row = random_row(count, family, seed)
        windows = list(_edges(Room.of(row, timed=timed), length))
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
