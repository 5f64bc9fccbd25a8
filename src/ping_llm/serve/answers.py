"""What each model answers, as jobs, and the one thread that computes them, a piece of each waiting job in turn.

A job is a generator. Where it yields None, others get their turn. Where it yields prompts, it gets their forecasts
back: those of all jobs that wait for some are computed together, as far as that is quicker on the device.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from queue import PriorityQueue
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import can_measure
from ping_llm.core.rtt import Floats, Ints, Observations, Questions, RttDistribution
from ping_llm.models.completer.inference import Completer
from ping_llm.predict.predictor import Predictor
from ping_llm.predict.prompts import MIN_TOKENS, Histories, LikelyAddresses, Prompt, prompts_for
from ping_llm.predict.suggest import LEVELS, most_informative, shortlist, unmeasured_pairs
from ping_llm.predict.support import Support, widened
from ping_llm.rows.measurement_set import MeasurementSet
from ping_llm.runs.trained import SHIPPED
from ping_llm.serve.store import KnownMeasurements

Job = Generator[Sequence[Prompt] | None, RttDistribution | None, Any]
Forecast = Callable[[Sequence[Prompt]], RttDistribution]

_SCORED_PER_CALL: Final = 256
_OF_SOURCE: Final = 100_000  # measurements of each source, among which a language model looks for those of the pair
_NEAR: Final = 1.1  # an RTT is about another if it is at most so many times longer or shorter
_SIZES: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 255, 512, 1023, 1 << 30)
_NODES: Final = {  # for warming up
    4: ("192.0.2.1", "192.0.2.2", "192.0.2.3"),
    6: ("2001:db8::1", "2001:db8::2", "2001:db8::3"),
}
_TOKENS: Final = {4: 16, 6: 40}  # that a measurement of these pairs takes
_PROMPTS_PER_CALL: Final = 32  # unless a single job has more: the first of many clients is not to wait for the last
_STOP, _REQUEST, _BACKGROUND = range(3)
"""Whose turn comes first. A job that is not done always has one, or waits for a forecast that has."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """Both nodes in their canonical spelling; the time NaN means after everything that is known."""

    source: str
    destination: str
    time_s: float = np.nan

    def __post_init__(self) -> None:
        if not can_measure([self.source], self.destination)[0]:
            raise PingLlmError(
                f"{self.source} and {self.destination} are not of one family: no ping goes from one to the other"
            )


def queries_of(source: str, destinations: Iterable[str], time_s: float) -> list[Query]:
    return [Query(source=source, destination=destination, time_s=time_s) for destination in destinations]


def steady_predictor(where: Any, context: int) -> Predictor:
    """A model with few shapes, and the settings of the command line."""
    return Predictor.from_pretrained(where, context=context, contexts_per_call=16)


class ModelAnswers:
    def __init__(self, predictor: Predictor) -> None:
        self.predictor, self.model = predictor, predictor.model
        self.is_completer = isinstance(predictor.model, Completer)
        is_shipped = predictor.trained.where == str(SHIPPED)
        self.name = "the completer that comes with ping-llm" if is_shipped else predictor.name
        self.max_tokens: int = 0 if self.is_completer else predictor.trained.config.max_target_length
        self.max_context = predictor.settings.whole - 1 if self.is_completer else self.max_tokens // MIN_TOKENS
        """Measurements that an answer can be computed from."""

    def forecast(self, prompts: Sequence[Prompt]) -> Any:
        return self.predictor.language_model.forecast(prompts)

    def predict(self, queries: Sequence[Query], known: KnownMeasurements) -> Job:
        """One distribution for each query, and for each what a completer's answer rests on (see `schemas.Support`).

        Queries of one time share what is known before it.
        """
        times, time_of = np.unique([query.time_s for query in queries], return_inverse=True)
        numbers: list[Ints] = []
        parts: list[RttDistribution] = []
        supports: list[Support] = []
        prompts: list[Prompt] = []
        for group in (np.flatnonzero(time_of == number) for number in range(len(times))):
            measured, questions, nodes = self._prepare([queries[number] for number in group.tolist()], known)
            if not self.is_completer:
                numbers.append(group)
                prompts += prompts_for(measured.observations, questions, nodes, self.max_tokens)
                continue
            support = Support.of(measured.observations, questions)
            for rows, answers in self.predictor.in_parts(measured.observations, questions, nodes, support):
                numbers.append(group[rows])
                parts.append(answers)
                supports.append(support.take(rows))
                yield None
        order = np.argsort(np.concatenate(numbers))
        if parts:
            found, support = _concatenated(parts).take(order), _concatenated(supports).take(order)
            return found, pa.table(support.columns(support.reasons(found))).to_pylist()
        return (yield [prompts[index] for index in order.tolist()]), [None] * len(queries)

    def _prepare(
        self, queries: Sequence[Query], known: KnownMeasurements
    ) -> tuple[MeasurementSet, Questions, tuple[str, ...]]:
        """What queries of one time may be answered from, the queries in numbers, and all nodes, known ones first."""
        time_s = queries[0].time_s
        sources = None if self.is_completer else [query.source for query in queries]
        measured = known.latest(sources, time_s, _OF_SOURCE)
        node = {address: number for number, address in enumerate(measured.nodes)}
        ends = [[node.setdefault(end, len(node)) for end in (query.source, query.destination)] for query in queries]
        source, destination = np.array(ends, dtype=np.int64).T
        times = np.array([query.time_s for query in queries])
        return (
            measured,
            Questions(source=source, destination=destination, time_s=times),
            measured.addresses_of(tuple(node)),
        )

    def growth(self, query: Query, known: KnownMeasurements, sizes: Sequence[int] | None = None) -> Job:
        """One query, answered from the `sizes` most informative measurements (None: about a dozen sizes up to all).

        Gives the known measurements, the rows of the context, the sizes, and a distribution for each size.
        """
        measured, questions, nodes = self._prepare([query], known)
        observations = measured.observations
        context = self.predictor.context(observations, questions, nodes)
        sizes = sorted({min(size, len(context)) for size in (_SIZES if sizes is None else sizes)})
        subsets = [observations.take(np.sort(context[:size])) for size in sizes]
        if isinstance(self.model, Completer):
            parts, support = [], Support.of(observations, questions)
            if sizes[-1] == len(context):
                subsets[-1] = observations  # the prediction itself
            for some in subsets:
                parts.append(widened(self.model.predict(some, questions, nodes), support))
                yield None
            return measured, context, sizes, _concatenated(parts)
        if np.isnan(query.time_s) and len(context):  # as the prompt with the whole context has it
            questions = replace(questions, time_s=observations.time_s[context[:1]] + 1.0)
        answers = yield [prompts_for(some, questions, nodes, self.max_tokens)[0] for some in subsets]
        return measured, context, sizes, answers

    def destinations(
        self, source: str, rtt_ms: float | None, among: list[str], known: KnownMeasurements, time_s: float, count: int
    ) -> Job:
        """Who answers in about this time? Among candidates or, if a language model has none, among all addresses.

        Gives `LikelyAddresses` (covered is NaN among candidates) and the distribution of the RTT of each.
        """
        if self.is_completer:
            if not among:
                raise PingLlmError("a completer knows no addresses: name candidates, or start the server with --rows")
            if rtt_ms is None:
                raise PingLlmError("a completer needs an RTT to look for")
            answers, _ = yield from self.predict(queries_of(source, among, time_s), known)
            near = (answers.cdf(rtt_ms * _NEAR) - answers.cdf(rtt_ms / _NEAR)) * (1 - answers.p_failed)
            likely, order = _likeliest(among, near, count)
            return likely, answers.take(order)
        if among:
            before = self._before(source, known, time_s)
            yield None
            logs = _scoring().rank(self.predictor.language_model, source, among, rtt_ms, **before)
            likely, _ = _likeliest(among, np.exp(logs), count)
        else:
            likely = yield from self.complete(source, "", rtt_ms, known, time_s, count)
        answers, _ = yield from self.predict(queries_of(source, likely.addresses, time_s), known)
        return likely, answers

    def complete(
        self, source: str, prefix: str, rtt_ms: float | None, known: KnownMeasurements, time_s: float, count: int
    ) -> Job:
        """The rest of an address. Gives `LikelyAddresses`."""
        model, before = self.predictor.language_model, self._before(source, known, time_s)
        yield None
        return _scoring().destinations(model, source, rtt_ms, count=count, prefix=prefix, **before)

    def _before(self, source: str, known: KnownMeasurements, time_s: float) -> dict[str, Any]:
        """The time, and what the source measured before it, as the language model takes them."""
        measured, history = known.latest([source], time_s, self.max_context), None
        if source in measured.nodes:
            history = Histories(measured.observations, measured.addresses_of()).own(measured.nodes.index(source))
        return {"history": history, "time_s": None if np.isnan(time_s) else time_s}

    def suggest(self, known: KnownMeasurements, budget: int, seconds: float) -> Job:
        """The pairs to measure next, as `Predictor.suggest` finds them, among as many as there is time to predict.

        Gives their queries, distributions, what these rest on, and whether there was time for all.
        """
        if not self.is_completer:
            raise PingLlmError("a language model names no pairs to measure: start the server without --checkpoint")
        end, measured = time.monotonic() + seconds, known.latest(None, np.nan, self.max_context)
        pairs = unmeasured_pairs(measured.observations, measured.nodes)
        pairs = pairs.take(shortlist(pairs, measured.observations, budget))
        support = Support.of(measured.observations, pairs)
        numbers: list[Ints] = [np.zeros(0, np.int64)]
        parts: list[RttDistribution] = []
        for rows, answers in self.predictor.in_parts(measured.observations, pairs, measured.addresses_of(), support):
            numbers.append(rows)
            parts.append(answers)
            yield None
            if time.monotonic() > end:
                break
        found = np.concatenate(numbers)
        if not parts:
            return [], None, [], True
        answers = _concatenated(parts)
        low, high = answers.quantile([LEVELS[0], LEVELS[-1]]).T
        best = most_informative(pairs.take(found), np.log(high / low), measured.observations, budget)
        chosen, answers, support = pairs.take(found[best]), answers.take(best), support.take(found[best])
        ends = zip(chosen.source.tolist(), chosen.destination.tolist(), strict=True)
        queries = [Query(source=measured.nodes[one], destination=measured.nodes[other]) for one, other in ends]
        rests_on = pa.table(support.columns(support.reasons(answers))).to_pylist()
        return queries, answers, rests_on, len(found) == len(pairs)

    def anomaly_scores(self, measured: MeasurementSet, which: Ints, seconds: float) -> Job:
        """Columns of some of the measurements, as many as there is time for, the latest first: their NLL in bits, and
        (completer) the median, 10 % and 90 % quantile of what was expected.

        Gives which were scored, the columns, and whether there was time for all.
        """
        end, count = time.monotonic() + seconds, len(measured.observations)
        columns = {name: np.full(count, np.nan) for name in ("bits", "expected", "low", "high")}
        is_scored = np.zeros(count, dtype=bool)
        for rows, of_rows in self._scores_in_parts(measured, which):
            is_scored[rows] = True
            for name, values in of_rows.items():
                columns[name][rows] = values
            yield None
            if time.monotonic() > end:
                break
        scored = np.flatnonzero(is_scored)
        return scored, {name: values[scored] for name, values in columns.items()}, bool(is_scored[which].all())

    def _scores_in_parts(self, measured: MeasurementSet, which: Ints) -> Iterator[tuple[Ints, dict[str, Floats]]]:
        """A completer scores one by one; a language model a source at a time, in pieces after a full context."""
        known = measured.observations
        if self.is_completer:
            nodes = measured.addresses_of()
            for row in which[::-1, None]:
                answer = self.predictor.predict(known, known.questions.take(row), nodes)
                low, middle, high = answer.quantile([0.1, 0.5, 0.9]).T
                yield row, {"bits": answer.bits(known.rtt_ms[row]), "expected": middle, "low": low, "high": high}
            return
        histories, timed = Histories(known, measured.addresses_of()), not np.isnan(known.time_s).any()
        for source in np.unique(known.source[which]).tolist():
            row, rows = histories.row(source)
            wanted = np.flatnonzero(np.isin(rows, which))
            for stop in range(int(wanted[-1]) + 1, int(wanted[0]), -_SCORED_PER_CALL):
                start = max(int(wanted[0]), stop - _SCORED_PER_CALL)
                piece = slice(max(0, start - self.max_context), stop)
                columns = {name: getattr(row, name)[piece] for name in ("destinations", "time_us", "rtt_ms")}
                scored = _scoring().score_rows(self.predictor.language_model, [replace(row, **columns)], timed=timed)
                bits, own = scored[0].result[start - stop :], rows[start:stop]
                kept = np.isin(own, which)
                yield own[kept], {"bits": bits[kept]}

    def warm_up(self) -> Job:
        """Compute each kind of query once, a single prediction first: a shape that was met is compiled."""
        yield None
        if not isinstance(self.model, Completer):
            from ping_llm.predict.language_model import SHARED_QUESTIONS

            histories = [
                _example(family, length * 5 // 8) for family in (4, 6) for length in self.model.history_lengths
            ]
            counts: tuple[int, ...] = (1, 2, SHARED_QUESTIONS)
        else:
            sizes = (self.max_context, 1, self.predictor.settings.context - 1, 255)
            histories = [_example(4, size * _TOKENS[4]) for size in sizes]
            counts = (1, 2, 17)  # one of each of the shapes
        for count, history in itertools.product(counts, histories):
            source, destination, _ = history.nodes
            queries = queries_of(source, [destination] * count, np.nan)
            yield from self._without_waiting(self.predict(queries, KnownMeasurements(history=history)))
        if self.is_completer:
            return
        for history, is_search in itertools.product(histories, (True, False)):
            source, *candidates = history.nodes[:2]
            known = KnownMeasurements(history=history)
            job = self.destinations(source, 10.0, [] if is_search else candidates, known, np.nan, 1)
            yield from self._without_waiting(job)
        for history in histories:
            ends = np.array([0, len(history.observations) - 1])
            yield from self._without_waiting(self.anomaly_scores(history, ends, np.inf))

    def _without_waiting(self, job: Job) -> Job:
        """A job whose forecasts are not computed together with those of others, who would have to wait for them."""
        answer = None
        with suppress(StopIteration):
            while True:
                prompts = job.send(answer)
                answer = None if prompts is None else self.forecast(prompts)
                yield None


def _example(family: int, tokens: int) -> MeasurementSet:
    """A measurement per second, of two destinations in turn, which take about so many tokens."""
    count = max(1, tokens // _TOKENS[family])
    nth = np.arange(count)
    observations = Observations(
        source=np.zeros(count, np.int64),
        destination=1 + nth % 2,
        time_s=nth.astype(np.float64),
        rtt_ms=np.ones(count, np.float32),
    )
    return MeasurementSet(nodes=_NODES[family], observations=observations)


def _concatenated(parts: Sequence[Any]) -> Any:
    """Data classes of columns as one of them."""
    columns = {f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(parts[0])}
    return type(parts[0])(**columns)


def _scoring() -> Any:
    """What only language models can do, which takes JAX."""
    from ping_llm.predict import scoring

    return scoring


def _likeliest(addresses: Sequence[str], probability: Floats, count: int) -> tuple[LikelyAddresses, Ints]:
    order = np.argsort(-probability, kind="stable")[:count]
    chosen = tuple(addresses[index] for index in order.tolist())
    return LikelyAddresses(addresses=chosen, probability=probability[order], covered=np.nan), order


class BusyError(PingLlmError):
    """No answer now; after so many seconds there may be one."""

    retry_after = 2


class WarmingError(BusyError):
    retry_after = 10


@dataclass(frozen=True, eq=False)
class _Running:
    job: Job
    priority: int
    future: Future[Any] = field(default_factory=Future)


class ModelThread:
    """Use it in a `with` block, at the end of which whatever still waits is cancelled."""

    def __init__(self, forecast: Forecast, max_jobs: int) -> None:
        self._forecast, self._max_jobs = forecast, max_jobs
        self._turns: PriorityQueue[tuple[int, int, Callable[[], None] | None]] = PriorityQueue()
        self._number = itertools.count()
        self._running: set[_Running] = set()
        self._waiting: deque[tuple[_Running, Sequence[Prompt]]] = deque()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)

    def __enter__(self) -> "ModelThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._add_turn(_STOP, None)
        self._thread.join(timeout=10)

    def submit(self, job: Job, *, background: bool = False) -> Future[Any]:
        """Have a job done; in the background, while nobody waits. A cancelled future ends its job at its next turn."""
        if not background and sum(one.priority == _REQUEST for one in tuple(self._running)) >= self._max_jobs:
            raise BusyError("the server is busy: try again in a few seconds")
        running = _Running(job, _BACKGROUND if background else _REQUEST)
        self._running.add(running)
        self._add_turn(running.priority, partial(self._resume, running))
        return running.future

    def _add_turn(self, priority: int, turn: Callable[[], None] | None) -> None:
        self._turns.put((priority, next(self._number), turn))

    def _work(self) -> None:
        while turn := self._turns.get()[-1]:
            turn()
        for running in tuple(self._running):
            running.job.close()
            running.future.cancel()

    def _resume(self, running: _Running, answer: RttDistribution | None = None, error: Exception | None = None) -> None:
        """Do the next piece of a job (with an error: its last)."""
        future = running.future
        error = CancelledError() if future.cancelled() else error
        try:
            prompts = running.job.send(answer) if error is None else running.job.throw(error)
        except StopIteration as done:
            settle = partial(future.set_result, done.value)
        except Exception as failure:
            settle = partial(future.set_exception, failure)
        else:
            if prompts is not None:
                self._waiting.append((running, prompts))
            return self._add_turn(running.priority, partial(self._resume, running) if prompts is None else self._answer)
        self._running.remove(running)
        if future.set_running_or_notify_cancel():
            settle()

    def _answer(self) -> None:
        """Forecast the prompts of the first jobs that wait, unless that was done with those of others."""
        now: list[_Running] = []
        prompts: list[Prompt] = []
        edges, answers, error = [0], None, None
        while self._waiting and (not now or len(prompts) + len(self._waiting[0][1]) <= _PROMPTS_PER_CALL):
            running, own = self._waiting.popleft()
            now.append(running)
            prompts += own
            edges.append(len(prompts))
        try:
            answers = self._forecast(prompts) if now else None
        except Exception as failure:
            error = failure
        for running, some in zip(now, map(slice, edges, edges[1:]), strict=True):
            self._resume(running, None if answers is None else answers.take(some), error)
