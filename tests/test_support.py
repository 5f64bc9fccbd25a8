"""What an answer rests on: counts and chains, as a plain search finds them, and when an answer is a guess."""

import numpy as np
import pytest

from ping_llm.core.rtt import Observations, Questions
from ping_llm.models.completer.inference import BinDistribution
from ping_llm.predict.support import NO_CHAIN, Support, measured_before, widened


def plain_support(known: Observations, source: int, destination: int, time_s: float) -> tuple[int, int, int, int]:
    columns = zip(*(column.tolist() for column in vars(known).values()), strict=True)
    before = [
        (a, b, rtt) for a, b, t, rtt in columns if a >= 0 and b >= 0 and (time_s != time_s or t != t or t < time_s)
    ]
    links = [{a, b} for a, b, rtt in before if rtt == rtt]
    hops, reached = 0, {source}
    while destination not in reached:
        further = reached.union(*(link for link in links if link & reached))
        if further == reached:
            hops = NO_CHAIN
            break
        hops, reached = hops + 1, further
    counts = [sum({a, b} == {source, destination} for a, b, _ in before)]
    counts += [sum((a == node) + (b == node) for a, b, _ in before) for node in (source, destination)]
    return counts[0], counts[1], counts[2], hops


@pytest.mark.parametrize("few", [0, 1000])
@pytest.mark.parametrize("timeless", [False, True])
@pytest.mark.parametrize("measured", [0, 6, 25, 60])
def test_counts_and_chains_are_those_of_a_plain_search(
    monkeypatch: pytest.MonkeyPatch, measured: int, few: int, *, timeless: bool
) -> None:
    monkeypatch.setattr("ping_llm.predict.support._FEW", few)
    random = np.random.default_rng(measured)
    known = Observations(
        source=random.integers(0, 20, measured),
        destination=random.integers(0, 20, measured),
        time_s=np.where(timeless, np.nan, random.integers(0, 9, measured).astype(float)),
        rtt_ms=np.where(random.random(measured) < 0.2, np.nan, 10.0),
    )
    times = np.array([np.nan, 0.0, 3.0, 5.5, 9.0])
    questions = Questions(
        source=random.integers(-1, 22, 400), destination=random.integers(-1, 22, 400), time_s=random.choice(times, 400)
    )
    found = Support.of(known, questions)
    got = list(zip(found.pair, found.source, found.destination, found.chain, strict=True))
    ends = zip(questions.source.tolist(), questions.destination.tolist(), questions.time_s.tolist(), strict=True)
    assert got == [plain_support(known, *question) for question in ends]
    if measured == 25:
        assert {NO_CHAIN, 0, 1, 2, 3} <= set(found.chain.tolist())


def test_measured_is_the_median_of_the_latest_answers_before_the_question_in_either_direction() -> None:
    random = np.random.default_rng(0)
    known = Observations(
        source=random.integers(0, 4, 400),
        destination=random.integers(0, 4, 400),
        time_s=np.sort(random.choice(1000, 400, replace=False)).astype(float),
        rtt_ms=np.where(random.random(400) < 0.2, np.nan, random.exponential(20, 400)),
    )
    ends = random.integers(-1, 6, (2, 200))
    questions = Questions(source=ends[0], destination=ends[1], time_s=random.choice([np.nan, 0.0, 90.0, 500.0], 200))
    plain = []
    for one, other, time_s in zip(*ends, questions.time_s, strict=True):
        ends_of = zip(known.source.tolist(), known.destination.tolist(), strict=True)
        of_pair = np.array([{a, b} == {one, other} for a, b in ends_of])
        before = of_pair & ~np.isnan(known.rtt_ms) & ((known.time_s < time_s) | np.isnan(time_s))
        plain.append(np.median(known.rtt_ms[before][-25:]) if before.any() else np.nan)
    assert 0 < np.isnan(plain).sum() < 200
    np.testing.assert_allclose(measured_before(known, questions), plain)


def test_only_answers_without_a_chain_are_widened_and_not_those_of_new_nodes() -> None:
    known = Observations(
        source=np.array([0, 2]), destination=np.array([1, 3]), time_s=np.zeros(2), rtt_ms=np.array([9.0, 9.0])
    )
    source, destination = np.array([[0, 1], [0, 2], [0, 9], [8, 9]]).T
    support = Support.of(known, Questions(source=source, destination=destination, time_s=np.full(4, np.nan)))
    sharp = np.zeros((4, 512), np.float32)
    sharp[:, 250] = 1.0
    answers = BinDistribution(p_failed=np.linspace(0.1, 0.4, 4), probability=sharp)
    wide = widened(answers, support)
    width = np.divide(*wide.interval(0.9)[::-1])
    assert (width[[0, 2, 3]] < 1.1).all()
    assert width[1] > 10
    assert wide.probability.sum(axis=1) == pytest.approx(1.0)
    assert wide.p_failed.tolist() == answers.p_failed.tolist()


def test_says_why_an_answer_is_a_guess() -> None:
    ends = np.array([[0, 1, 20.0], [1, 2, 30.0], [3, 4, 40.0], [0, 2, np.nan]])
    known = Observations(
        source=ends[:, 0].astype(int), destination=ends[:, 1].astype(int), time_s=np.zeros(4), rtt_ms=ends[:, 2]
    )
    source, destination = np.array([[0, 1], [0, 2], [0, 3], [8, 9], [8, 0], [0, 8], [0, 1], [0, 1]]).T
    questions = Questions(source=source, destination=destination, time_s=np.full(8, np.nan))
    probability = np.zeros((8, 256))
    probability[np.arange(8), [128] * 6 + [0, 255]] = 1.0
    answers = BinDistribution(p_failed=np.zeros(8), probability=probability)
    beyond = "the answer reaches beyond the RTTs of the training"
    assert Support.of(known, questions).reasons(answers).tolist() == [
        None,
        "the pair has only timed out",
        "no chain of measurements links the two ends",
        "neither end was ever measured",
        "the source was never measured",
        "the destination was never measured",
        beyond,
        beyond,
    ]
