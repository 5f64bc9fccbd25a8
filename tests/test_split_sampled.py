"""Questions drawn from many: the same every time, and from everywhere."""

import numpy as np
import pytest

from ping_llm.evaluate.split import sampled
from split_fixtures import equal, random_world


class TestSampled:
    def test_is_a_part_in_the_same_order_and_the_same_every_time(self) -> None:
        questions = random_world(2_000).observations
        few, many = sampled(questions, 100), sampled(questions, 1_000)
        assert (len(few), len(many)) == (100, 1_000)
        assert equal(few, sampled(questions, 100))
        place = {t: i for i, t in enumerate(questions.time_s.tolist())}
        assert (np.diff([place[t] for t in few.time_s.tolist()]) > 0).all()
        assert set(few.time_s) <= set(many.time_s)
        assert not equal(few, sampled(questions, 100, seed=1))

    def test_is_everything_where_there_is_not_more(self) -> None:
        questions = random_world(50).observations
        assert equal(sampled(questions, 50), questions)
        assert equal(sampled(questions, 500), questions)
        assert len(sampled(questions, 0)) == 0

    def test_takes_from_everywhere(self) -> None:
        questions = random_world(100_000).observations
        middle = np.searchsorted(questions.time_s, sampled(questions, 10_000).time_s) / 100_000
        assert np.histogram(middle, 10, (0, 1))[0] == pytest.approx(1_000, rel=0.15)
