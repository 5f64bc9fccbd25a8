"""What each model answers, as jobs for the model's thread (see `model_thread`): the verbs of the Python API.

predict       the result of many questions
growing       of one question, from ever more of what the model would look at
destinations  who answers in about this time?
complete      the rest of an address
surprise      bits of measurements, given those before
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import numpy as np

from ping_llm.baselines.interface import Floats, Ints
from ping_llm.completer import Completer
from ping_llm.distribution import RttDistribution
from ping_llm.errors import PingLlmError
from ping_llm.predict import LanguageModel, Predictor, addresses
from ping_llm.predict.contexts import Prompt
from ping_llm.predict.histories import Histories, prompts_for
from ping_llm.rows.format import ProbeRow
from ping_llm.serve.model_thread import Job
from ping_llm.serve.questions import Asked, Knowledge, by_time, questions_of
from ping_llm.sources.observations import Measured
from ping_llm.train.trained import SHIPPED

_LEAST_TOKENS: Final = 12
"""Of a measurement. Bounds how many fit the context of a language model."""
_SCORED_AT_ONCE: Final = 256
_NEAR: Final = 1.1
"""An RTT is about another if it is at most so many times longer or shorter."""


@dataclass(frozen=True, kw_only=True)
class Grown:
    measured: Measured
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
            logs = addresses.rank(model, source, candidates, rtt_ms, history=own, time_s=when)
            found = Found(addresses=list(candidates), probability=np.exp(logs), answers=None, covered=None)
            found = _best(found, count)
        else:
            likely = addresses.destinations(model, source, rtt_ms, history=own, time_s=when, count=count)
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
        likely = addresses.complete(
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
