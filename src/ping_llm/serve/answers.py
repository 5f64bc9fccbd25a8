"""What each model answers, as jobs for the model's thread (see `model_thread`): the verbs of the Python API.

predict       the result of many questions
growing       of one question, from ever more of what the model would look at
destinations  who answers in about this time?
complete      the rest of an address
surprise      bits of measurements, given those before
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import numpy as np

from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import Floats, Ints, Observations, RttDistribution
from ping_llm.models.completer.inference import Completer
from ping_llm.predict import scoring
from ping_llm.predict.language_model import STEADY_QUESTIONS, LanguageModel, steady_histories
from ping_llm.predict.predictor import Predictor
from ping_llm.predict.prompts import Histories, Prompt, pack, prompts_for
from ping_llm.rows.format import ProbeRow
from ping_llm.rows.measurement_set import MeasurementSet
from ping_llm.runs.trained import SHIPPED
from ping_llm.serve.model_thread import Job
from ping_llm.serve.questions import Asked, Knowledge, by_time, questions_of

_LEAST_TOKENS: Final = 12
"""Of a measurement. Bounds how many fit the context of a language model."""
_SCORED_AT_ONCE: Final = 256
_NEAR: Final = 1.1
"""An RTT is about another if it is at most so many times longer or shorter."""


@dataclass(frozen=True, kw_only=True)
class Grown:
    measured: MeasurementSet
    chosen: Ints
    """Which of the measured ones were looked at, most telling first."""
    sizes: list[int]
    answers: RttDistribution
    """From the first so many of them, one for each size."""


@dataclass(frozen=True, kw_only=True)
class Found:
    addresses: list[str]
    probability: Floats
    answers: RttDistribution | None
    """What is predicted for each."""
    covered: float | None
    """Of a search over all addresses: probability of those that were looked at."""


def steady_predictor(where: Any, context: int) -> Predictor:
    """A model whose shapes are few. A processor computes contexts no faster together than one by one."""
    at_once = 1 if jax.default_backend() == "cpu" else 16
    predictor = Predictor.from_pretrained(where, context=context, contexts_per_call=at_once)
    if isinstance(predictor.model, LanguageModel):
        vars(predictor)["model"] = replace(predictor.model, steady=True)
    return predictor


class Answers:
    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.model = predictor.model

    @property
    def is_completer(self) -> bool:
        return isinstance(self.model, Completer)

    @property
    def is_shipped(self) -> bool:
        return self.predictor.trained.where == str(SHIPPED)

    @property
    def length(self) -> int:
        """Tokens of a language model's context."""
        return self.predictor.trained.config.max_target_length

    @property
    def looks_at(self) -> int:
        """Measurements that an answer can be drawn from, at most."""
        return self.predictor.settings.context - 1 if self.is_completer else self.length // _LEAST_TOKENS

    def forecast(self, prompts: Sequence[Prompt]) -> RttDistribution:
        return self.predictor.language_model.forecast(prompts)

    def predict(self, asked: Sequence[Asked], knowledge: Knowledge) -> Job:
        return self._completed(asked, knowledge) if self.is_completer else self._forecast(asked, knowledge)

    def _completed(self, asked: Sequence[Asked], knowledge: Knowledge) -> Job:
        assert isinstance(self.model, Completer)
        numbers, parts = [], []
        for group in by_time(asked):
            measured = knowledge.of_pairs(asked[group[0]].time_s)
            questions, nodes = questions_of([asked[number] for number in group], measured.nodes)
            for rows, answers in self.model.in_parts(measured.observations, questions, nodes):
                numbers.append(np.array(group)[rows])
                parts.append(answers)
                yield None
        order = np.argsort(np.concatenate(numbers))
        joined = {
            name: np.concatenate([getattr(part, name) for part in parts])[order] for name in ("p_failed", "probability")
        }
        return type(parts[0])(**joined)

    def _forecast(self, asked: Sequence[Asked], knowledge: Knowledge) -> Job:
        prompts: list[Prompt | None] = [None] * len(asked)
        for group in by_time(asked):
            some = [asked[number] for number in group]
            measured = knowledge.of_sources([one.source for one in some], some[0].time_s, self.looks_at)
            questions, nodes = questions_of(some, measured.nodes)
            for number, prompt in zip(
                group, prompts_for(measured.observations, questions, nodes, self.length), strict=True
            ):
                prompts[number] = prompt
        return (yield [prompt for prompt in prompts if prompt is not None])

    def growing(self, asked: Asked, knowledge: Knowledge, sizes: Sequence[int] | None = None) -> Job:
        """From the `sizes` most telling measurements (None: about a dozen sizes up to all)."""
        if self.is_completer:
            measured = knowledge.of_pairs(asked.time_s)
        else:
            measured = knowledge.of_sources([asked.source], asked.time_s, self.looks_at)
        questions, nodes = questions_of([asked], measured.nodes)
        known = measured.observations
        chosen = self.predictor.context(known, questions, nodes)
        wanted = sorted({min(size, len(chosen)) for size in (_SIZES if sizes is None else sizes)})
        fewer = [known.take(np.sort(chosen[:size])) for size in wanted]
        if isinstance(self.model, LanguageModel):
            if np.isnan(asked.time_s) and len(chosen):  # as the prompt with all of them has it
                questions = replace(questions, time_s=known.time_s[chosen[:1]] + 1.0)
            prompts = [prompts_for(some, questions, nodes, self.length)[0] for some in fewer]
            answers = yield prompts
        else:
            parts = []
            for some in fewer:
                parts.append(self.model.predict(some, questions, nodes))
                yield None
            answers = type(parts[0])(
                p_failed=np.concatenate([part.p_failed for part in parts]),
                probability=np.concatenate([part.probability for part in parts]),
            )
        assert answers is not None
        return Grown(measured=measured, chosen=chosen, sizes=wanted, answers=answers)

    def destinations(
        self,
        source: str,
        rtt_ms: float | None,
        candidates: Sequence[str],
        knowledge: Knowledge,
        time_s: float,
        count: int,
    ) -> Job:
        """Among candidates or, if a language model has none, among all addresses."""
        if not candidates and self.is_completer:
            raise PingLlmError("a completer knows no addresses: name candidates, or start the server with --rows")
        if self.is_completer:
            found = yield from self._likely_among(source, rtt_ms, candidates, knowledge, time_s)
            return _best(found, count)
        model, own, when = self.predictor.language_model, self._row(source, knowledge, time_s), _none_if_nan(time_s)
        yield None
        if candidates:
            logs = scoring.rank(model, source, candidates, rtt_ms, history=own, time_s=when)
            found = Found(addresses=list(candidates), probability=np.exp(logs), answers=None, covered=None)
            found = _best(found, count)
        else:
            likely = scoring.destinations(model, source, rtt_ms, history=own, time_s=when, count=count)
            found = Found(
                addresses=list(likely.addresses), probability=likely.probability, answers=None, covered=likely.covered
            )
        answers = yield from self._forecast(_asked(source, found.addresses, time_s), knowledge)
        return replace(found, answers=answers)

    def _likely_among(
        self, source: str, rtt_ms: float | None, candidates: Sequence[str], knowledge: Knowledge, time_s: float
    ) -> Job:
        """The chance that the RTT of each is about the wanted one."""
        if rtt_ms is None:
            raise PingLlmError("a completer needs an RTT to look for")
        answers = yield from self._completed(_asked(source, candidates, time_s), knowledge)
        about = answers.cdf(rtt_ms * _NEAR) - answers.cdf(rtt_ms / _NEAR)
        chance = about * (1 - answers.p_failed)
        return Found(addresses=list(candidates), probability=chance, answers=answers, covered=None)

    def complete(
        self, source: str, prefix: str, rtt_ms: float | None, knowledge: Knowledge, time_s: float, count: int
    ) -> Job:
        model, own = self.predictor.language_model, self._row(source, knowledge, time_s)
        yield None
        likely = scoring.complete_address(
            model, source, prefix, rtt_ms=rtt_ms, history=own, time_s=_none_if_nan(time_s), count=count
        )
        return Found(
            addresses=list(likely.addresses), probability=likely.probability, answers=None, covered=likely.covered
        )

    def _row(self, source: str, knowledge: Knowledge, time_s: float) -> ProbeRow | None:
        measured = knowledge.of_sources([source], time_s, self.looks_at)
        if source not in measured.nodes:
            return None
        return Histories(measured.observations, measured.nodes).row(measured.nodes.index(source))[0]


_SIZES: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 255)


def _asked(source: str, destinations: Sequence[str], time_s: float) -> list[Asked]:
    return [Asked(source=source, destination=destination, time_s=time_s) for destination in destinations]


def _best(found: Found, count: int) -> Found:
    order = np.argsort(-found.probability, kind="stable")[:count]
    return Found(
        addresses=[found.addresses[place] for place in order.tolist()],
        probability=found.probability[order],
        answers=None if found.answers is None else found.answers.take(order),
        covered=found.covered,
    )


def _none_if_nan(time_s: float) -> float | None:
    return None if np.isnan(time_s) else time_s


# Surprise of measurements that came over the wire, a piece at a time, latest first, as far as the time goes.


@dataclass(frozen=True, kw_only=True)
class Scored:
    which: Ints
    bits: Floats
    in_time: bool
    """Whether all that were wanted have been scored."""


def score(answers: Answers, measured: MeasurementSet, most: int, seconds: float) -> Job:
    """Of the latest measurements: so many, or as many as there is time for."""
    end = time.monotonic() + seconds
    which = np.arange(len(measured.observations))[-most:]
    scored, bits = [], []
    pieces = completed_bits(answers, measured, which) if answers.is_completer else _read_bits(answers, measured, which)
    for part, of_part in pieces:
        scored.append(part)
        bits.append(of_part)
        yield None
        if time.monotonic() > end:
            break
    done = np.concatenate(scored)
    order = np.argsort(done)
    return Scored(which=done[order], bits=np.concatenate(bits)[order], in_time=len(done) == len(which))


def completed_bits(
    answers: Answers, measured: MeasurementSet, which: Ints
) -> Generator[tuple[Ints, Floats], None, None]:
    assert isinstance(answers.model, Completer)
    known = measured.observations
    for place in which[::-1].tolist():
        one = np.array([place])
        found = answers.model.predict(known, known.questions.take(one), measured.nodes)
        yield one, found.bits(known.rtt_ms[one])


def _read_bits(answers: Answers, measured: MeasurementSet, which: Ints) -> Generator[tuple[Ints, Floats], None, None]:
    """Of a source at a time, in pieces before which stands as much as a context can hold."""
    known = measured.observations
    histories, timed = Histories(known, measured.nodes), not np.isnan(known.time_s).any()
    for source in np.unique(known.source[which]).tolist():
        row, places = histories.row(source)
        first = int(np.searchsorted(places, which[0]))
        for stop in range(len(places), first, -_SCORED_AT_ONCE):
            start = max(first, stop - _SCORED_AT_ONCE)
            piece = _piece(row, max(0, start - answers.looks_at), stop)
            bits = scoring.score_rows(answers.predictor.language_model, [piece], timed=timed)[0].result
            yield places[start:stop], bits[start - stop :]


def _piece(row: ProbeRow, start: int, stop: int) -> ProbeRow:
    return replace(
        row,
        destinations=row.destinations[start:stop],
        time_us=row.time_us[start:stop],
        rtt_ms=row.rtt_ms[start:stop],
    )


# Asking each kind of question once: a shape that was met is compiled, and nobody waits for it again.

_ENDS = {4: ("192.0.2.1", "192.0.2.2"), 6: ("2001:db8::1", "2001:db8::2")}


def warm_up(answers: Answers) -> Job:
    """First what a single question needs."""
    yield None
    if isinstance(answers.model, Completer):
        yield from _completer(answers.model, answers.looks_at)
    else:
        yield from _language_model(answers.model)


def _completer(model: Completer, most: int) -> Job:
    shared = model.prediction.questions_per_context
    for asked in (
        (1,) if model.prediction.contexts_per_call == 1 else (1, shared + 1)
    ):  # one context, or several at once
        pairs = [Asked(source=_ENDS[4][0], destination=f"192.0.2.{2 + number}") for number in range(asked)]
        questions, nodes = questions_of(pairs, ())
        for count in (most, 1):
            ends = np.zeros(count, np.int64)
            times = np.arange(count, dtype=np.float64)
            model.predict(
                Observations(source=ends, destination=ends + 1, time_s=times, rtt_ms=np.ones(count, np.float32)),
                questions,
                nodes,
            )
            yield None


def _language_model(model: LanguageModel) -> Job:
    lengths = sorted({model.padded_history(size) for size in range(1, model.config.max_target_length, 64)})
    question = np.full(20, 1, np.uint16)

    def prompts(length: int, histories: int, questions: int) -> list[Prompt]:
        """Of different histories, as few as make a shape."""
        return [
            Prompt(history=np.full(length - 1, 1 + number, np.uint16), question=question, measurements=1)
            for number in range(histories)
            for _ in range(questions)
        ]

    for histories, questions in (*((count, 1) for count in steady_histories()), (1, STEADY_QUESTIONS)):
        for length in lengths:
            model.forecast(prompts(length, histories, questions))
            yield None
    for family, (source, destination) in _ENDS.items():
        for length in lengths:
            row = _row(model, family, length)
            scoring.destinations(model, source, 10.0, history=row, count=1)
            yield None
            scoring.rank(model, source, [destination], 10.0, history=row)
            yield None
    scoring.score_rows(model, [_row(model, 4, 1)])
    yield None


def _row(model: LanguageModel, family: int, length: int) -> ProbeRow:
    """A history that is read at this length."""
    source, destination = pack(_ENDS[family])
    count = max(1, (length * 3 // 4) // (12 if family == 4 else 36))
    return ProbeRow(
        family=family,
        source=source.tobytes(),
        time_us=np.arange(count, dtype=np.int64) * 1_000_000,
        destinations=np.tile(destination, (count, 1)),
        rtt_ms=np.ones(count, np.float32),
    )
