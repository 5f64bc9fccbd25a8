"""Models beside the classical predictors, by four protocols that are always reported apart.

unseen pair    two nodes that are known, but nothing that one measured to the other
seen pair      two nodes that measured each other before, at a later time
unseen probe   a source of which nothing was learned, from what it measured before the question
disconnected   two nodes that no chain of known measurements links: all those between two halves of the nodes are hidden

What may be learned from and what is asked follows from the split (see `split`). Models get the history, of which they
may look at what lies strictly before a question, and so do causal baselines. Static baselines are fitted to what of it
lies before the cut: the part for training, and what unseen probes measured, or they could say nothing about them.
Distributions around the baselines' answers are learned from the part for training alone. Of large data, baselines get a
part that is enough for the questions (see `sampling`).
"""

import fnmatch
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Protocol

import numpy as np

from ping_llm.baselines import shortcuts, standard_baselines
from ping_llm.baselines.forecasts import Asked, Rehearsal, forecast
from ping_llm.baselines.interface import Baseline, fitted
from ping_llm.core.console import Advance, no_progress
from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import History, Ints, Observations, Questions, RttDistribution
from ping_llm.evaluate.sampling import sufficient
from ping_llm.evaluate.scores import ORACLE, Evaluation, ProtocolResult, ScoredAnswers, Scores
from ping_llm.evaluate.split import Split, sampled
from ping_llm.sources.simulator import World

Answer = tuple[str, str, RttDistribution]
"""Protocol, name of the predictor, and what it answers."""


class EvaluatedPredictor(Protocol):
    """What is evaluated."""

    def predict(self, known: Observations, questions: Questions, nodes: Sequence[str]) -> RttDistribution:
        """Looks only at what of `known` lies strictly before a question; `nodes` has the address of each node."""
        ...


@dataclass(frozen=True)
class Oracle:
    """A predictor that knows how the simulated Internet was made: no other can be expected to do better."""

    world: World

    def predict(self, known: Observations, questions: Questions, nodes: Sequence[str]) -> RttDistribution:
        addresses = np.array(nodes, dtype=object)
        source, destination = addresses[questions.source], addresses[questions.destination]
        return self.world.distribution(source, destination, questions.time_s)


def evaluate(
    split: Split,
    models: Mapping[str, EvaluatedPredictor],
    *,
    baselines: Sequence[Baseline] | None = None,
    questions: int = 1000,
    seed: int = 0,
    oracle: World | None = None,
    only: Sequence[str] = (),
    advance: Advance = no_progress,
    finished: Callable[[str, Mapping[str, Scores]], None] = lambda name, scores: None,
    note: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Ask every model, every baseline and, on simulated data, the truth: at most so many questions of each protocol.

    The same split, seed and number of questions ask the same questions. `only` has names or patterns of those who are
    asked. `advance` is told of every predictor that has answered a protocol; `finished`, of every one that has answered
    all of them, with its scores by protocol; `note`, of where baselines make do with less than all measurements.
    """
    if baselines is None:
        baselines = standard_baselines(split.nodes, symmetric=is_mesh(split.train), seed=seed)
    asked = {name: sampled(all_of_it, questions, seed) for name, all_of_it in split.questions.items()}
    predictors: dict[str, EvaluatedPredictor] = {**models} | ({ORACLE: Oracle(oracle)} if oracle else {})
    names = [baseline.name for baseline in baselines] + list(predictors)
    if len(set(names)) < len(names) or ORACLE in models:
        raise ValueError(f"every predictor needs a name of its own, not {names}")
    names = _matching(names, only)
    baselines = [baseline for baseline in baselines if baseline.name in names]
    predictors = {name: predictor for name, predictor in predictors.items() if name in names}

    histories = {protocol: split.visible(split.history, protocol) for protocol in asked}
    answers: dict[str, dict[str, ScoredAnswers]] = {protocol: {} for protocol in asked}
    of_models = (
        (protocol, name, predictor.predict(histories[protocol], rows.questions, split.nodes))
        for name, predictor in predictors.items()
        for protocol, rows in asked.items()
    )
    advance(0, total=len(asked) * len(names))
    of_baselines = baseline_forecasts(split, asked, baselines, seed, note)
    for protocol, name, predicted in side_by_side(of_baselines, of_models):
        answers[protocol][name] = ScoredAnswers.of(predicted, asked[protocol])
        advance()
        if all(name in by_name for by_name in answers.values()):
            finished(name, {protocol: by_name[name].scores for protocol, by_name in answers.items()})
    return Evaluation(
        models=tuple(name for name in models if name in names),
        protocols={
            protocol: ProtocolResult(
                questions=rows,
                known_before=_known_before(_timed(histories[protocol]), rows),
                answers={name: answers[protocol][name] for name in names},
            )
            for protocol, rows in asked.items()
        },
    )


def side_by_side(*streams: Iterator[Answer]) -> Iterator[Answer]:
    """What each of them yields, as it comes: each runs in a thread of its own, for most of a baseline computes on one
    core. The first error ends them all."""
    results: SimpleQueue[Answer | BaseException | None] = SimpleQueue()
    is_over = threading.Event()

    def run(stream: Iterator[Answer]) -> None:
        try:
            for answer in stream:
                results.put(answer)
                if is_over.is_set():
                    return
        except BaseException as error:
            results.put(error)
        results.put(None)

    for stream in streams:
        threading.Thread(target=run, args=[stream], daemon=True).start()
    running = len(streams)
    try:
        while running:
            found = results.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                running -= 1
            else:
                yield found
    finally:
        is_over.set()


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise PingLlmError(f"no predictor is called {pattern!r}: there are {', '.join(names)}")
    return [name for name in names if not patterns or any(fnmatch.fnmatchcase(name, one) for one in patterns)]


def baseline_forecasts(
    split: Split,
    asked: Mapping[str, Observations],
    baselines: Sequence[Baseline],
    seed: int,
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[Answer]:
    if not baselines:
        return
    every, split = len(split.train), sufficient(split, asked.values(), seed)
    if len(split.train) < every:
        note(f"baselines are fitted to {len(split.train):,} of {every:,} measurements: those near the questions")
    for text in shortcuts(split.train, baselines):
        note(text)
    train, history = _timed(split.train), _timed(split.history)
    heard = history if split.timeless else history.take(history.time_s < split.cut_time_s)
    known_of = dict.fromkeys(asked, (history, heard))
    if "disconnected" in asked:
        known_of["disconnected"] = split.visible(history, "disconnected"), split.visible(heard, "disconnected")
    looking_back, learning = (
        {name: Asked(known_of[name][which], rows.questions) for name, rows in asked.items()} for which in range(2)
    )
    rehearsal = Rehearsal(train, seed)
    for baseline in baselines:
        residuals = rehearsal.residuals(baseline)
        for protocol, questions in (looking_back if baseline.causal else learning).items():
            predict = fitted(baseline, questions.known)
            yield protocol, baseline.name, forecast(predict, questions.by(baseline), residuals)


def _timed(known: Observations) -> Observations:
    """What has no time lies before every question: baselines would take it to be later."""
    untimed = np.isnan(known.time_s)
    return replace(known, time_s=np.where(untimed, 0.0, known.time_s)) if untimed.any() else known


def _known_before(history: Observations, asked: Observations) -> Ints:
    by_source = History.about(asked.source, history.source, history.time_s, np.zeros(len(history)))
    start, stop = by_source.span(asked.source, asked.time_s)
    return stop - start


def is_mesh(train: Observations) -> bool:
    """Whether most nodes are sources and destinations: then pairs are known in either direction, which hardly matters
    to a round trip. Where probes measure targets it is a different node at either end."""
    sources, destinations = np.unique(train.source), np.unique(train.destination)
    both = len(np.intersect1d(sources, destinations, assume_unique=True))
    return 2 * both > len(sources) + len(destinations) - both
