"""What each kind of model answers, as jobs for the model's thread (jobs.py)."""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
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
from ping_llm.serve.jobs import Job
from ping_llm.serve.store import KnownMeasurements

_SCORED_PER_CALL: Final = 256
_LATEST_OF_SOURCE: Final = 100_000  # measurements of a source that a language model searches for those of the pair
_NEAR: Final = 1.1  # an RTT is near another one if it is at most this many times longer or shorter
_CONTEXT_SIZES: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 255, 512, 1023, 1 << 30)

# Warming up: example pairs of each address family, and the tokens that one of their measurements takes.
_EXAMPLE_NODES: Final = {
    4: ("192.0.2.1", "192.0.2.2", "192.0.2.3"),
    6: ("2001:db8::1", "2001:db8::2", "2001:db8::3"),
}
_EXAMPLE_TOKENS: Final = {4: 16, 6: 40}


@dataclass(frozen=True, kw_only=True)
class Query:
    """Both nodes in canonical spelling; a time of NaN means after all known measurements."""

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
    """A model that is compiled for few shapes, with the settings of the command line."""
    return Predictor.from_pretrained(where, context=context, contexts_per_call=16)


class ModelAnswers:
    """Every public method that returns a `Job` computes one kind of answer, a piece at a time."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor, self.model = predictor, predictor.model
        self.is_completer = isinstance(predictor.model, Completer)
        is_shipped = predictor.trained.where == str(SHIPPED)
        self.name = "the completer that comes with ping-llm" if is_shipped else predictor.name
        self.max_tokens: int = 0 if self.is_completer else predictor.trained.config.max_target_length
        self.max_context = predictor.settings.part - 1 if self.is_completer else self.max_tokens // MIN_TOKENS
        """Measurements that an answer can be computed from."""

    def forecast(self, prompts: Sequence[Prompt]) -> Any:
        return self.predictor.language_model.forecast(prompts)

    def predict(self, queries: Sequence[Query], known: KnownMeasurements) -> Job:
        """The distribution of each query's result, and what it rests on (`schemas.Support`; completer only).

        Queries of the same time share the measurements before it.
        """
        times, time_of = np.unique([query.time_s for query in queries], return_inverse=True)
        numbers: list[int] = []
        prompts: list[Prompt] = []
        parts: list[RttDistribution] = []
        supports: list[dict[str, Any]] = []
        for group in (np.flatnonzero(time_of == number) for number in range(len(times))):
            measured, questions, nodes = self._prepare([queries[number] for number in group.tolist()], known)
            if self.is_completer:
                rows, answers, rests_on = yield from self._in_parts(measured.observations, questions, nodes)
                group = group[rows]
                parts.append(answers)
                supports += rests_on
            else:
                prompts += prompts_for(measured.observations, questions, nodes, self.max_tokens)
            numbers += group.tolist()
        order = np.argsort(numbers)
        if self.is_completer:
            return _concatenated(parts).take(order), [supports[index] for index in order]
        return (yield [prompts[index] for index in order]), [None] * len(queries)

    def _prepare(
        self, queries: Sequence[Query], known: KnownMeasurements
    ) -> tuple[MeasurementSet, Questions, tuple[str, ...]]:
        """For queries of one time: the measurements to answer from, the queries as numbers of nodes, and the addresses
        of these numbers, known nodes first."""
        time_s = queries[0].time_s
        sources = None if self.is_completer else [query.source for query in queries]
        measured = known.latest(sources, time_s, _LATEST_OF_SOURCE)
        node = {name: number for number, name in enumerate(measured.nodes)}
        ends = [[node.setdefault(end, len(node)) for end in (query.source, query.destination)] for query in queries]
        source, destination = np.array(ends, dtype=np.int64).T
        questions = Questions(source=source, destination=destination, time_s=np.full(len(queries), time_s))
        return measured, questions, measured.addresses_of(tuple(node))

    def _in_parts(self, known: Observations, questions: Questions, nodes: Sequence[str], end: float = np.inf) -> Job:
        """A completer's answers, as many as are ready at `end`: rows of the questions, distributions, supports."""
        support = Support.of(known, questions, nodes)
        rows: list[Ints] = []
        parts: list[RttDistribution] = []
        for some, answers in self.predictor.in_parts(known, questions, nodes, support):
            rows.append(some)
            parts.append(answers)
            yield None
            if time.monotonic() > end:
                break
        answered, found = np.concatenate(rows), _concatenated(parts)
        support = support.take(answered)
        return answered, found, pa.table(support.columns(support.reasons(found))).to_pylist()

    def growth(self, query: Query, known: KnownMeasurements, sizes: Sequence[int] | None = None) -> Job:
        """One query, answered from the `sizes` most informative measurements (None: about a dozen sizes up to all).

        Gives the known measurements, the rows of the context, the sizes, and a distribution for each size.
        """
        measured, questions, nodes = self._prepare([query], known)
        observations = measured.observations
        context = self.predictor.context(observations, questions, nodes)
        sizes = sorted({min(size, len(context)) for size in (_CONTEXT_SIZES if sizes is None else sizes)})
        subsets = [observations.take(np.sort(context[:size])) for size in sizes]
        if isinstance(self.model, Completer):
            parts, support = [], Support.of(observations, questions, nodes)
            if sizes[-1] == len(context):
                subsets[-1] = observations  # the prediction itself
            for some in subsets:
                parts.append(widened(self.model.predict(some, questions, nodes), support))
                yield None
            return measured, context, sizes, _concatenated(parts)
        if np.isnan(query.time_s) and len(context):  # the time that the prompt with the whole context has
            questions = replace(questions, time_s=observations.time_s[context[:1]] + 1.0)
        answers = yield [prompts_for(some, questions, nodes, self.max_tokens)[0] for some in subsets]
        return measured, context, sizes, answers

    def destinations(
        self, source: str, rtt_ms: float | None, among: list[str], known: KnownMeasurements, time_s: float, count: int
    ) -> Job:
        """Likely destinations for an RTT: among candidates or, without any, among all addresses (language model).

        Gives `LikelyAddresses` (covered is NaN among candidates) and the distribution of the RTT of each.
        """
        if self.is_completer:
            if not among:
                raise PingLlmError(
                    "a completer knows no addresses: name candidates, or start the server with --history"
                )
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
        """The likeliest addresses that begin with a prefix: `LikelyAddresses`."""
        if self.is_completer:
            raise PingLlmError("a completer knows no addresses: start the server with --checkpoint of a language model")
        model, before = self.predictor.language_model, self._before(source, known, time_s)
        yield None
        return _scoring().destinations(model, source, rtt_ms, count=count, prefix=prefix, **before)

    def _before(self, source: str, known: KnownMeasurements, time_s: float) -> dict[str, Any]:
        """The time, and what the source measured before it, as arguments of the language model's functions."""
        measured, history = known.latest([source], time_s, self.max_context), None
        if source in measured.nodes:
            history = Histories(measured.observations, measured.addresses_of()).own(measured.nodes.index(source))
        return {"history": history, "time_s": None if np.isnan(time_s) else time_s}

    def suggest(self, known: KnownMeasurements, budget: int, seconds: float) -> Job:
        """The pairs to measure next, as `Predictor.suggest` finds them, among as many as can be predicted in time.

        Gives their queries, distributions, supports, and whether all candidates were predicted.
        """
        if not self.is_completer:
            raise PingLlmError("a language model suggests no pairs to measure: start the server without --checkpoint")
        end, measured = time.monotonic() + seconds, known.latest(None, np.nan, self.max_context)
        observations, nodes = measured.observations, measured.nodes
        pairs = unmeasured_pairs(observations, nodes)
        pairs = pairs.take(shortlist(pairs, observations, budget))
        if not len(pairs):
            return [], None, [], True
        rows, answers, supports = yield from self._in_parts(observations, pairs, measured.addresses_of(), end)
        found = pairs.take(rows)
        low, high = answers.quantile([LEVELS[0], LEVELS[-1]]).T
        best = most_informative(found, np.log(high / low), observations, budget)
        ends = zip(found.source[best].tolist(), found.destination[best].tolist(), strict=True)
        queries = [Query(source=nodes[source], destination=nodes[destination]) for source, destination in ends]
        return queries, answers.take(best), [supports[index] for index in best], len(rows) == len(pairs)

    def anomaly_scores(self, measured: MeasurementSet, which: Ints, seconds: float) -> Job:
        """Columns for some measurements, as many as can be scored in time, the latest first: the NLL in bits, and
        (completer) median, 10 % and 90 % quantile of the predicted RTT.

        Gives which were scored, the columns, and whether all were.
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
        """A completer scores one by one; a language model source by source, in pieces that follow a full context."""
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
            needed = np.flatnonzero(np.isin(rows, which))
            for stop in range(int(needed[-1]) + 1, int(needed[0]), -_SCORED_PER_CALL):
                start = max(int(needed[0]), stop - _SCORED_PER_CALL)
                piece = slice(max(0, start - self.max_context), stop)
                columns = {name: getattr(row, name)[piece] for name in ("destinations", "time_us", "rtt_ms")}
                scored = _scoring().score_rows(self.predictor.language_model, [replace(row, **columns)], timed=timed)
                bits, own = scored[0].result[start - stop :], rows[start:stop]
                kept = np.isin(own, which)
                yield own[kept], {"bits": bits[kept]}

    def warm_up(self) -> Job:
        """Compute each kind of query once, a single prediction first, so that all shapes are compiled."""
        yield None
        if not isinstance(self.model, Completer):
            from ping_llm.predict.language_model import SHARED_QUESTIONS

            lengths = itertools.product((4, 6), self.model.history_lengths)
            histories = [_example(family, length * 5 // 8 // _EXAMPLE_TOKENS[family]) for family, length in lengths]
            counts: tuple[int, ...] = (1, 2, SHARED_QUESTIONS)
        else:
            sizes = (self.max_context, 1, self.predictor.settings.context - 1, 255)
            histories = [_example(4, size) for size in sizes]
            counts = (1, 2, 17)  # one of each of the shapes
        for count, history in itertools.product(counts, histories):
            source, destination, _ = history.nodes
            queries = queries_of(source, [destination] * count, np.nan)
            yield from self._alone(self.predict(queries, KnownMeasurements(history=history)))
        if self.is_completer:
            return
        for history, is_search in itertools.product(histories, (True, False)):
            source, *candidates = history.nodes[:2]
            known = KnownMeasurements(history=history)
            yield from self._alone(self.destinations(source, 10.0, candidates * (not is_search), known, np.nan, 1))
        for history in histories:
            ends = np.array([0, len(history.observations) - 1])
            yield from self._alone(self.anomaly_scores(history, ends, np.inf))

    def _alone(self, job: Job) -> Job:
        """A job whose forecasts are not computed together with those of requests, which would have to wait for them."""
        answer = None
        with suppress(StopIteration):
            while True:
                prompts = job.send(answer)
                answer = None if prompts is None else self.forecast(prompts)
                yield None


def _example(family: int, count: int) -> MeasurementSet:
    """About so many measurements, one per second, of two destinations in turn."""
    nth = np.arange(max(1, count))
    source, rtt_ms = np.zeros(len(nth), np.int64), np.ones(len(nth), np.float32)
    observations = Observations(source=source, destination=1 + nth % 2, time_s=nth.astype(np.float64), rtt_ms=rtt_ms)
    return MeasurementSet(nodes=_EXAMPLE_NODES[family], observations=observations)


def _concatenated(parts: Sequence[Any]) -> Any:
    """Distributions (data classes of columns) as one."""
    columns = {f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(parts[0])}
    return type(parts[0])(**columns)


def _scoring() -> Any:
    """What only language models can do; importing it needs JAX."""
    from ping_llm.predict import scoring

    return scoring


def _likeliest(addresses: Sequence[str], probability: Floats, count: int) -> tuple[LikelyAddresses, Ints]:
    order = np.argsort(-probability, kind="stable")[:count]
    chosen = tuple(addresses[index] for index in order.tolist())
    return LikelyAddresses(addresses=chosen, probability=probability[order], covered=np.nan), order
