"""Predictions of the language model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from language_model_fixtures import plain, random_row, untrained
from ping_llm import Predictor
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import MAX_RTT_MS
from ping_llm.core.rtt import CODES, Observations, code_bounds, decode_rtt, encode_rtt
from ping_llm.predict.language_model import LanguageModel
from ping_llm.predict.prompts import Histories, Prompt, prompt_of, with_query
from ping_llm.rows.format import ProbeRow
from ping_llm.tokens import RESULT_LAST, Role
from ping_llm.tokens.decode import decode

LENGTH = 256


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return replace(untrained(), config=Config(max_target_length=LENGTH))


@pytest.fixture(scope="module")
def rows() -> list[ProbeRow]:
    return [random_row(80, seed=seed) for seed in range(12)]


def prompt(row: ProbeRow, known: int, question: int) -> Prompt:
    """For a measurement of a row, given the first `known`."""
    history = replace(
        row, time_us=row.time_us[:known], destinations=row.destinations[:known], rtt_ms=row.rtt_ms[:known]
    )
    asked = with_query(history, int(row.time_us[question]), row.destinations[question], 1.0, LENGTH)
    return prompt_of(asked, LENGTH, timed=True, order=RESULT_LAST, answer_tokens=3)


class TestPrompt:
    def test_holds_the_newest_history_that_fits_and_ends_before_the_result(self, rows: list[ProbeRow]) -> None:
        row = rows[0]
        made = prompt(row, 40, 45)
        spelled = [*made.history.tolist(), *made.question.tolist(), Role.FAILED]
        assert LENGTH - 50 < len(spelled) <= LENGTH
        *history, asked = decode(spelled).measurements
        assert asked.failed
        assert len(history) == made.measurements > 3
        assert asked.time_s == row.time_us[45] // 1_000_000
        for measurement, index in zip(reversed(history), range(39, 0, -1), strict=False):
            assert measurement.time_s == row.time_us[index] // 1_000_000
            if np.isnan(row.rtt_ms[index]):
                assert measurement.failed
            else:
                assert measurement.rtt_ms == pytest.approx(row.rtt_ms[index], rel=1e-3)

    def test_needs_no_history(self, rows: list[ProbeRow]) -> None:
        made = prompt(rows[0], 0, 3)
        assert made.measurements == len(made.history) == 0
        assert made.question[0] == Role.MEASUREMENT_START

    def test_does_not_depend_on_the_answer_nor_on_what_comes_later(self, rows: list[ProbeRow]) -> None:
        row = rows[0]
        changed = row.rtt_ms.copy()
        changed[40:] = 7.0
        other = prompt(replace(row, rtt_ms=changed), 40, 45)
        np.testing.assert_array_equal(prompt(row, 40, 45).history, other.history)
        np.testing.assert_array_equal(prompt(row, 40, 45).question, other.question)


class TestForecast:
    def test_is_what_the_model_says_of_the_whole_sequence(self, model: LanguageModel, rows: list[ProbeRow]) -> None:
        """Histories that are read once, and shared, give what reading each sequence from its beginning gives."""
        prompts = [prompt(rows[0], 40, i) for i in (45, 60, 61)] + [prompt(rows[1], 0, 9), prompt(rows[2], 20, 25)]
        answers = np.array([52.1, 3.3, np.nan, 180.0, np.nan])
        found = model.forecast(prompts).log_likelihood(answers)
        for made, answer, likelihood in zip(prompts, answers.tolist(), found.tolist(), strict=True):
            start = [*made.history.tolist(), *made.question.tolist()]
            code = int(encode_rtt(np.float64(answer)))
            ending = [Role.FAILED] if np.isnan(answer) else [Role.RTT_START, 11 + (code >> 8), 11 + (code & 0xFF)]
            logs = plain([[*start, *ending]])[0, len(start) - 1 :]
            first_bytes = [11 + byte for byte in range(157) if byte < 8 or byte & 4]  # up to ten minutes
            allowed: list[list[int]] = [[Role.FAILED, Role.RTT_START], first_bytes, list(range(11, 267))]
            expected = sum(
                float(after[token] - np.logaddexp.reduce(after[options]))
                for after, token, options in zip(logs, ending, allowed, strict=False)
            )
            assert likelihood == pytest.approx(expected, abs=2e-4)

    def test_the_probabilities_of_all_rtts_add_up_to_one(self, model: LanguageModel, rows: list[ProbeRow]) -> None:
        forecast = model.forecast([prompt(row, 10, 12) for row in rows[:3]])
        for question in range(3):
            rtt, probability = forecast.pmf(question)
            assert probability.sum() == pytest.approx(1.0, abs=1e-5)
            assert np.all(np.diff(rtt) > 0)
            assert set(encode_rtt(rtt).tolist()) <= set(CODES.tolist())

    def test_no_rtt_is_longer_than_ten_minutes(self, model: LanguageModel, rows: list[ProbeRow]) -> None:
        """Weights drawn at random would have half of them longer."""
        forecast = model.forecast([prompt(row, 10, 12) for row in rows[:3]])
        assert np.all(forecast.quantile(1 - 1e-9) <= MAX_RTT_MS)
        assert np.all(forecast.cdf(MAX_RTT_MS) == 1.0)
        assert np.all(np.isfinite(forecast.bits(MAX_RTT_MS)))
        for question in range(3):
            rtt, probability = forecast.pmf(question)
            assert probability[rtt > MAX_RTT_MS].sum() == 0
            assert np.all(probability[rtt <= MAX_RTT_MS] > 0)

    def test_one_history_with_many_questions_answers_them_as_each_alone(
        self, model: LanguageModel, rows: list[ProbeRow]
    ) -> None:
        prompts = [prompt(rows[0], 40, question) for question in range(41, 79)]
        together, alone = model.forecast(prompts), model.forecast(prompts[20:21])
        assert len({made.history.tobytes() for made in prompts}) == 1
        np.testing.assert_allclose(alone.first[0], together.first[20], atol=1e-5)
        assert alone.quantile(0.5)[0] == pytest.approx(together.quantile(0.5)[20], rel=2e-3)

    def test_quantiles_interval_and_mean_are_those_of_the_pmf(self, model: LanguageModel, rows: list[ProbeRow]) -> None:
        forecast = model.forecast([prompt(row, len(row) // 2, len(row) - 1) for row in rows[:4]])
        for level in (0.05, 0.5, 0.95):
            found = forecast.quantile(level)
            for question, value in enumerate(found.tolist()):
                rtt, probability = forecast.pmf(question)
                below = np.cumsum(probability) / probability.sum()
                place = int(np.searchsorted(rtt, value))
                assert below[place] >= level - 1e-5
                assert place == 0 or below[place - 1] <= level + 1e-5
        low, high = forecast.interval(0.9)
        assert np.all((low <= forecast.median) & (forecast.median <= high))
        rtt, probability = forecast.pmf(1)
        assert forecast.mean[1] == pytest.approx(float(rtt @ probability))

    def test_samples_have_the_predicted_share_of_failures_and_median(
        self, model: LanguageModel, rows: list[ProbeRow]
    ) -> None:
        forecast = model.forecast([prompt(rows[0], 30, 31)])
        drawn = forecast.sample(20_000)[0]
        assert np.isnan(drawn).mean() == pytest.approx(float(forecast.p_failed[0]), abs=0.01)
        rtt, probability = forecast.pmf(0)
        expected = float(probability[rtt <= forecast.median[0]].sum())
        assert (drawn[~np.isnan(drawn)] <= forecast.median[0]).mean() == pytest.approx(expected, abs=0.02)

    def test_no_question_gives_no_answer(self, model: LanguageModel) -> None:
        assert len(model.forecast([])) == 0

    @pytest.mark.slow
    def test_questions_do_not_influence_each_other(self, model: LanguageModel, rows: list[ProbeRow]) -> None:
        prompts = [prompt(row, len(row) // 2, len(row) - 1) for row in rows]
        together = model.forecast(prompts)
        for i in (0, 7):
            alone = model.forecast([prompts[i]])
            np.testing.assert_allclose(alone.first[0], together.first[i], atol=1e-5)
            assert alone.p_failed[0] == pytest.approx(together.p_failed[i], abs=1e-5)

    def test_a_folder_that_is_no_run_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(PingLlmError, match="holds no trained model"):
            Predictor.from_pretrained(tmp_path)


def test_code_bounds_tile_the_axis_around_their_codes() -> None:
    values = decode_rtt(CODES)
    below, above = code_bounds(values)
    assert np.all((below <= values) & (values <= above))
    np.testing.assert_array_equal(below[1:], above[:-1])
    inside = (below + above) / 2
    np.testing.assert_array_equal(encode_rtt(inside[1:]), CODES[1:])


class TestContextOfAQuestion:
    NODES = ("192.0.2.1", *(f"198.51.100.{i}" for i in range(1, 11)))

    def known(self) -> Observations:
        """The source measured the first destination at the beginning, then the others in turn."""
        destination = np.array([1] * 6 + [2 + i % 9 for i in range(200)])
        return Observations(
            source=np.zeros(206, dtype=np.int64),
            destination=destination,
            time_s=1_700_000_000.0 + 60 * np.arange(206),
            rtt_ms=np.where(np.arange(206) % 7 == 3, np.nan, 20.0).astype(np.float32),
        )

    def test_is_what_the_pair_measured_however_long_ago_and_what_the_source_measured_last(self) -> None:
        histories = Histories(self.known(), self.NODES)
        context = histories.context(0, 1, np.nan, LENGTH)
        assert set(range(6)) <= set(context.tolist())
        latest = context[6:]
        assert np.array_equal(latest, np.arange(206 - len(latest), 206))

    def test_has_room_for_others_when_the_pair_was_measured_often(self) -> None:
        known = replace(self.known(), destination=np.array([2] * 100 + [1] * 106))
        context = Histories(known, self.NODES).context(0, 1, np.nan, LENGTH)
        of_pair = known.destination[context] == 1
        assert 0.3 < of_pair.mean() < 0.6
        assert np.array_equal(context[of_pair], np.arange(206 - of_pair.sum(), 206))

    def test_ends_before_the_question(self) -> None:
        known = self.known()
        context = Histories(known, self.NODES).context(0, 2, float(known.time_s[100]), LENGTH)
        assert context.max() == 99

    @pytest.mark.parametrize("length", [64, 100, 256, 1024])
    def test_fills_what_the_model_reads_and_not_more(self, length: int) -> None:
        known = self.known()
        histories = Histories(known, self.NODES)
        for time_s in (np.nan, float(known.time_s[3]), float(known.time_s[150])):
            prompt = histories.prompt(0, 1, time_s, length)
            size = len(prompt.history) + len(prompt.question) + 3
            assert size <= length
            assert prompt.measurements == len(histories.context(0, 1, time_s, length))
            if np.isnan(time_s) and length < 1024:
                assert size > length - 45

    def test_of_a_source_that_measured_nothing_is_empty(self) -> None:
        assert len(Histories(self.known(), self.NODES).prompt(3, 4, np.nan, LENGTH).history) == 0
