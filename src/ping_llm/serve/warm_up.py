"""Asking each kind of question once: a shape that was met is compiled, and nobody waits for it again."""

import numpy as np

from ping_llm.baselines.interface import Observations
from ping_llm.completer import Completer
from ping_llm.predict import LanguageModel, addresses
from ping_llm.predict.contexts import Prompt
from ping_llm.predict.language_model import STEADY_QUESTIONS, steady_histories
from ping_llm.predict.sequences import pack
from ping_llm.predict.surprise import surprise
from ping_llm.rows.format import ProbeRow
from ping_llm.serve.answers import Answers
from ping_llm.serve.model_thread import Job
from ping_llm.serve.questions import Asked, questions_of

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
    lengths = sorted({model.history_length(size) for size in range(1, model.config.max_target_length, 64)})
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
            addresses.destinations(model, source, 10.0, history=row, count=1)
            yield None
            addresses.rank(model, source, [destination], 10.0, history=row)
            yield None
    surprise(model, _row(model, 4, 1))
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
