"""Curves are thinned and smoothed without distortion; numbers are shown short; any text stays text."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ping_llm.core.rtt import Floats
from ping_llm.report.charts import Chart, Line, smoothed, spread, thinned
from ping_llm.report.formatting import SI, Style, number, short

VALUES = arrays.arrays(np.float64, st.integers(1, 400), elements=st.floats(-1e6, 1e6))
ANY_VALUES = arrays.arrays(np.float64, st.integers(1, 400), elements=st.floats(allow_nan=True, allow_infinity=True))


class TestThinned:
    @given(ANY_VALUES, st.integers(1, 20))
    def test_the_extremes_and_ends_are_kept_and_nothing_is_made_up(self, y: Floats, buckets: int) -> None:
        x = np.arange(len(y), dtype=np.float64)
        at, value = thinned(x, y, buckets)
        assert len(at) <= max(5 * buckets, 4 * buckets)
        assert np.all(np.diff(at) > 0)
        kept = np.isfinite(value)
        np.testing.assert_array_equal(value[kept], y[at.astype(int)][kept])
        finite = y[np.isfinite(y)]
        if len(finite):
            assert finite.min() == value[kept].min()
            assert finite.max() == value[kept].max()
            if np.isfinite(y[-1]):
                assert at[-1] == x[-1]

    @given(st.integers(2, 500), st.data())
    def test_a_gap_stays_a_gap(self, length: int, data: st.DataObject) -> None:
        y = np.linspace(0, 1, length)
        y[data.draw(st.integers(0, length - 1))] = np.nan
        assert np.isnan(thinned(np.arange(length, dtype=np.float64), y, 10)[1]).sum() == 1

    def test_a_million_steps_become_about_a_thousand_points(self) -> None:
        y = np.random.default_rng(0).normal(size=1_000_000)
        at, _ = thinned(np.arange(len(y), dtype=np.float64), y)
        assert 600 < len(at) <= 1_200


class TestSmoothed:
    @given(VALUES, st.integers(1, 50))
    def test_a_mean_lies_between_its_values(self, y: Floats, window: int) -> None:
        mean = smoothed(y, window)
        slack = 1e-6 * (1 + np.abs(y).max())
        assert np.all(mean >= y.min() - slack)
        assert np.all(mean <= y.max() + slack)

    def test_it_is_the_mean_of_the_neighbours_on_both_sides_and_at_the_end_of_those_before(self) -> None:
        np.testing.assert_allclose(smoothed(np.array([0.0, 3, 6, 0, 9]), 3), [0, 3, 3, 5, 4.5])

    def test_what_is_no_number_is_left_out_of_the_mean(self) -> None:
        np.testing.assert_allclose(smoothed(np.array([1.0, np.nan, 5, np.inf, 7]), 3), [1, 3, 5, 6, 7])
        assert np.isnan(smoothed(np.full(9, np.nan), 3)).all()

    def test_it_does_not_lag_behind_a_line(self) -> None:
        y = np.linspace(5, 1, 100)
        np.testing.assert_allclose(smoothed(y, 20)[:-10], y[:-10])


@given(st.integers(0, 10_000), st.integers(2, 60))
def test_the_lines_of_a_table_are_spread_from_first_to_last(points: int, most: int) -> None:
    lines = spread(points, most)
    assert len(lines) == min(points, most)
    assert sorted(set(lines)) == lines
    if points > 1:
        assert (lines[0], lines[-1]) == (0, points - 1)


@pytest.mark.parametrize(
    ("value", "style", "text"),
    [
        (0.0, "number", "0"),
        (2.00450, "number", "2.005"),
        (1234.6, "number", "1,235"),
        (-0.25, "number", "−0.25"),
        (2.5e-5, "number", "2.5e−5"),
        (0.0, "percent", "0 %"),
        (1.0, "percent", "100 %"),
        (0.1234, "percent", "12.3 %"),
        (0.0042, "percent", "0.42 %"),
        (10.0, "percent", "1,000 %"),
        (12_345, "count", "12.3k"),
        (700, "count", "700"),
        (math.nan, "number", "–"),
    ],
)
def test_numbers_are_short_and_exact_enough(value: float, style: Style, text: str) -> None:
    assert number(value, style) == text


def test_large_numbers_get_a_prefix() -> None:
    assert [short(v, SI, " ") for v in (2.9e16, 5e9, 12)] == ["29 P", "5 G", "12"]
    assert [short(v) for v in (999.6, 111_800_000, 2.9e16, None)] == ["1k", "112M", "29,000T", "–"]


def test_a_chart_is_json_with_gaps_for_what_is_not_finite() -> None:
    line = Line(name="a", x=np.array([1.0, 2, 3]), y=np.array([0.1234567, np.nan, np.inf]))
    (series,) = Chart(title="T", unit="u", lines=[line]).spec["series"]
    assert (series["x"], series["y"]) == ([1, 2], [0.12346, None])


def test_lines_over_the_same_steps_share_a_table() -> None:
    steps, others = np.arange(1.0, 101), np.array([50.0])
    lines = [Line(name=name, x=x, y=x / 10) for name, x in (("a", steps), ("b", others), ("c", steps))]
    (first, shown), (second, only) = Chart(title="T", unit="u", lines=lines).tables
    assert [line.name for line in (*first, *second)] == ["a", "c", "b"]
    assert (len(shown), shown[0], shown[-1], only) == (40, 0, 99, [0])
