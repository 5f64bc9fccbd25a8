"""One interface for both models: from known measurements and questions to distributions.

>>> predictor = Predictor.from_pretrained()                       # the completer that comes with the package
>>> predictor.predict_df(questions, history="my_pings.csv")       # a data frame with quantiles
>>> predictor.distributions(questions, history="my_pings.csv")    # distributions, one for each question
>>> predictor.predict(known, questions, nodes).interval(0.9)      # the same, of columns of numbers
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import pyarrow as pa

from ping_llm.core.cells import time_microseconds
from ping_llm.core.console import Advance, no_progress
from ping_llm.core.console import progress as progress_of
from ping_llm.core.errors import DroppedRowsWarning, PingLlmError, explained, extras_needed, options_as_arguments
from ping_llm.core.measurements import (
    MAX_TIME_US,
    NAMED,
    UNPARSABLE,
    format_address,
    of_two_families,
    parse_column,
    parse_nodes,
)
from ping_llm.core.rtt import Floats, Ints, Observations, Questions, RttDistribution
from ping_llm.models.completer.inference import Completer, PredictionSettings
from ping_llm.predict.support import Support, measured_before, widened
from ping_llm.rows.measurement_set import MeasurementSet, read_observations, rows_observations, table_observations
from ping_llm.runs.trained import SHIPPED, Trained, completer_settings, load_trained
from ping_llm.sources.columns import AS_FOUND, InputOptions, question_columns
from ping_llm.sources.nodes import NO_NODES, Nodes, addresses_of, shown_names

if TYPE_CHECKING:
    from ping_llm.predict.language_model import LanguageModel

_AT_ONCE: Final = 4096
"""Questions to the language model, whose answers are large."""

History = Any
"""A path or glob, several of them, or a data frame."""


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A trained model that answers. Make one by `from_pretrained`."""

    trained: Trained
    settings: PredictionSettings = field(default_factory=PredictionSettings)
    """Of the completer; the language model has nothing to set."""

    @classmethod
    def from_pretrained(cls, where: Path | str | None = None, **settings: Any) -> Self:
        """A run, an exported folder, or (None) the completer that comes with the package.

        `settings` are those of `PredictionSettings`, such as `votes=4` or `context=512`.
        """
        checked = PredictionSettings(**settings)
        return cls(trained=load_trained(where), settings=checked)

    def __repr__(self) -> str:
        what = "completer" if self.trained.is_completer else "language model"
        where = "of the package" if self.trained.where == str(SHIPPED) else repr(self.trained.where)
        set_to = f"; context={self.settings.context}" if self.trained.is_completer else ""
        return f"Predictor({what} {where}, {self.trained.steps:,} steps{set_to})"

    @property
    def name(self) -> str:
        return Path(self.trained.where).name

    def training_measurements(self) -> list[MeasurementSet]:
        """The real measurements that the model was trained on, read again from where they were."""
        from ping_llm.config import parse_blend
        from ping_llm.contexts.spec import RowsSpec

        files = self.trained.config.network_train_files
        if not files:
            return []
        if self.trained.is_completer:
            return [read_observations([files])]
        folders = (RowsSpec.find(pattern, "train").folder for pattern, _ in parse_blend(files))
        return [rows_observations(Path(folder), "train") for folder in folders]

    @cached_property
    def model(self) -> "Completer | LanguageModel":
        if self.trained.is_completer:
            settings = completer_settings(self.trained.config)
            return Completer(settings=settings, weights=self.trained.weights, prediction=self.settings)
        with extras_needed("a language model"):
            from ping_llm.predict.language_model import LanguageModel

        return LanguageModel.of(self.trained)

    @property
    def language_model(self) -> "LanguageModel":
        """For what only the language model can answer: addresses, times, the likelihood of a whole measurement."""
        if isinstance(self.model, Completer):
            raise PingLlmError(f"{self.trained.where} is a completer: it knows RTTs only. This needs a language model")
        return self.model

    def predict(
        self, known: Observations, questions: Questions, nodes: Sequence[str], advance: Advance | None = None
    ) -> RttDistribution:
        """The result of each question, from what was known strictly before its time (NaN: from everything).

        `nodes` are the addresses of the nodes' numbers.
        """
        if isinstance(self.model, Completer):
            return widened(self.model.predict(known, questions, nodes, advance), Support.of(known, questions, nodes))
        from ping_llm.predict.prompts import prompts_for

        answers = self.model.forecast(prompts_for(known, questions, nodes, self.trained.config.max_target_length))
        if advance is not None:
            advance(len(questions))
        return answers

    def in_parts(
        self,
        known: Observations,
        questions: Questions,
        nodes: Sequence[str],
        support: Support,
        advance: Advance | None = None,
    ) -> Iterator[tuple[Ints, RttDistribution]]:
        """The same as they come: rows of the questions, and their answers. A million at once would fill the memory."""
        if isinstance(self.model, Completer):
            for rows, answers in self.model.in_parts(known, questions, nodes, advance):
                yield rows, widened(answers, support.take(rows))
            return
        from ping_llm.predict.prompts import Histories

        histories = Histories.about(questions, known, nodes)
        for begin in range(0, len(questions), _AT_ONCE):
            rows = np.arange(begin, min(begin + _AT_ONCE, len(questions)))
            prompts = histories.prompts(questions.take(rows), self.trained.config.max_target_length)
            yield rows, self.model.forecast(prompts)
            if advance is not None:
                advance(len(rows))

    def context(self, known: Observations, question: Questions, nodes: Sequence[str]) -> Ints:
        """Which known measurements the answer to one question is drawn from, most informative first.

        The completer chooses them for the pair; the language model takes the latest of the pair and of the source.
        """
        source, destination, time_s = (column[0].item() for column in vars(question).values())
        if isinstance(self.model, Completer):
            return self.model.history(known, nodes, question).context(source, destination, time_s)
        from ping_llm.predict.prompts import Histories

        histories = Histories(known, nodes)
        kept = histories.context(source, destination, time_s, self.trained.config.max_target_length)
        _, rows = histories.row(source, histories.family_of(source, destination))
        return rows[kept[::-1]]

    def anomaly_scores(
        self, measured: MeasurementSet, which: Ints | None = None, advance: Advance | None = None
    ) -> Floats:
        """NLL in bits of the results of some measurements (None: all), each given all that was measured before it.

        The completer looks at all sources, in a context for each measurement; the language model at the source's own
        measurements, which it reads in one go.
        """
        known = measured.observations
        which = np.arange(len(known)) if which is None else which
        if isinstance(self.model, Completer):
            answers = self.predict(known, known.questions.take(which), measured.addresses_of(), advance)
            return answers.bits(known.rtt_ms[which])
        from ping_llm.predict.prompts import Histories
        from ping_llm.predict.scoring import score_rows

        histories = Histories(known, measured.addresses_of())
        found = [histories.row(source) for source in np.unique(known.source[which]).tolist()]
        timed = not np.isnan(known.time_s).any()
        bits = np.full(len(known), np.nan)
        scored = score_rows(self.model, [row for row, _ in found], timed=timed)
        for (_, rows), of_source in zip(found, scored, strict=True):
            bits[rows] = of_source.result
        if advance is not None:
            advance(len(which))
        return bits[which]

    def predict_df(
        self,
        df: Any,
        *,
        history: History | None = None,
        quantile_levels: Sequence[float] = (0.1, 0.5, 0.9),
        progress: bool = False,
        **input_options: Any,
    ) -> Any:
        """A data frame of questions, with the answers in new columns.

        `df` has the columns `src_addr` and `dst_addr`, and may have `event_time`; it is one of pandas, Polars or Arrow,
        and so is the answer. `history` holds known measurements: such a data frame with `rtt` too, or files; rows of it
        that cannot be used are dropped, with a `DroppedRowsWarning`. How it is to be read is found by looking at it,
        unless `input_options` say so: those of `InputOptions`, such as `rtt_unit="us"` or `columns={"rtt": "delay_x"}`.
        `progress` shows how far it is on standard error.

        New columns: `p_failed`, `predictions` (the median RTT in ms), and one for each level, named like "0.1"; then
        what the answer rests on: `measured` (the median of the pair's latest 25 answers), `pair_measurements`,
        `src_measurements`, `dst_measurements`, `chain` (hops of the shortest chain of measurements between the two),
        `distance_km` (if positions are known), `extrapolating`, and the `reason` if it is.
        """
        levels = checked_levels(quantile_levels)
        table, measured = _to_arrow(df, "the questions"), _known(history, input_options)
        with _shown(progress, "predicting", len(table)) as advance:
            return _from_arrow(self.answered(table, measured, levels, advance), df)

    def distributions(
        self, df: Any, *, history: History | None = None, progress: bool = False, **input_options: Any
    ) -> RttDistribution:
        """The distribution of the result of each question, in the order of the rows; otherwise as `predict_df`.

        A completer's takes 19 kB of memory for each question.
        """
        table, measured = _to_arrow(df, "the questions"), _known(history, input_options)
        questions, nodes = read_questions(table, measured.nodes, measured.described)
        with _shown(progress, "predicting", len(table)) as advance:
            return self.predict(measured.observations, questions, measured.addresses_of(nodes), advance)

    def anomalies(
        self, history: History, *, last: int | None = None, progress: bool = False, **input_options: Any
    ) -> pa.Table:
        """Measurements beside what was expected of them, given those before: see `ping_llm.predict.anomalies`.

        Of the latest `last` (None: of all), in time order.
        """
        from ping_llm.predict.anomalies import anomalies

        if last is not None and last < 1:
            raise PingLlmError(f"last must be at least 1; got {last}")
        measured = _known(history, input_options)
        which = np.arange(len(measured.observations))[-(last or 0) :]
        with _shown(progress, "scoring", len(which)) as advance:
            return anomalies(self, measured, which, len(which), advance)

    def answered(
        self, table: pa.Table, measured: MeasurementSet, levels: Sequence[float], advance: Advance | None = None
    ) -> pa.Table:
        """A table of questions with the columns that `predict_df` names, in place of any of the same names."""
        questions, nodes = read_questions(table, measured.nodes, measured.described)
        nodes = measured.addresses_of(nodes)
        support = Support.of(measured.observations, questions, nodes)
        names = ["p_failed", "predictions", *(f"{level:g}" for level in levels)]
        values = np.full((len(names), table.num_rows), np.nan)
        reasons = np.full(table.num_rows, None, dtype=object)
        for rows, answers in self.in_parts(measured.observations, questions, nodes, support, advance):
            reasons[rows] = support.take(rows).reasons(answers)
            values[:, rows] = np.stack([answers.p_failed, answers.median, *answers.quantile(list(levels)).T])
        columns = dict(zip(names, map(pa.array, values), strict=True))
        columns["measured"] = pa.array(measured_before(measured.observations, questions), from_pandas=True)
        columns |= support.columns(reasons)
        table = table.drop_columns([name for name in columns if name in table.column_names])
        for name, column in columns.items():
            table = table.append_column(name, column)
        return table

    def suggest(
        self, history: History, *, budget: int = 50, among: Any = None, advance: Advance | None = None
    ) -> pa.Table:
        """The pairs whose measurement would say most, best first, with the columns of `predict_df`.

        Candidates are the pairs of a source and a destination of the history that were not measured, or those of the
        data frame `among`; of many, a random part.
        """
        from ping_llm.predict.suggest import LEVELS, most_informative, shortlist, unmeasured_pairs

        if budget < 1:
            raise PingLlmError(f"budget must be at least 1; got {budget}")
        measured = _known(history, {})
        known, nodes = measured.observations, measured.nodes
        if among is not None:
            table = _to_arrow(among, "the candidates")
            pairs, _ = read_questions(table, measured.nodes, measured.described)
            rows = shortlist(pairs, known, budget)
            asked, table = pairs.take(rows), table.take(rows)
        else:
            pairs = unmeasured_pairs(known, nodes)
            asked = pairs.take(shortlist(pairs, known, budget))
            ends = ([nodes[node] for node in column.tolist()] for column in (asked.source, asked.destination))
            table = pa.table(dict(zip(("src_addr", "dst_addr"), ends, strict=True)))
        answered = self.answered(table, measured, LEVELS, advance)
        low, high = (answered[f"{level:g}"].to_numpy() for level in (LEVELS[0], LEVELS[-1]))
        return answered.take(most_informative(asked, np.log(high / low), known, budget))


# Questions, known measurements and answers as tables of pandas, Polars or Arrow.


def _shown(progress: bool, what: str, total: int) -> AbstractContextManager[Advance]:
    return progress_of(what, total) if progress else nullcontext(no_progress)


def _known(history: History | None, input_options: Mapping[str, Any]) -> MeasurementSet:
    """What a Python program gave, which is warned of what was dropped; commands have read theirs and told it."""
    with options_as_arguments():
        measured = load_history(history, InputOptions(**input_options))
    if measured.dropped and measured is not history:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in measured.dropped.items())
        warnings.warn(f"rows of the history that are not used: {reasons}", DroppedRowsWarning, stacklevel=3)
    return measured


def load_history(history: History | None, options: InputOptions = AS_FOUND) -> MeasurementSet:
    """Known measurements. Without any, a model falls back on what it learned in training."""
    if history is None:
        return table_observations(None)
    if isinstance(history, MeasurementSet):
        return history
    paths = [history] if isinstance(history, str | Path) else history
    if isinstance(paths, Sequence) and all(isinstance(path, str | Path) for path in paths):
        return read_observations(paths, options=options)
    if hasattr(history, "iloc") and history.index.inferred_type == "string":  # a matrix of pandas
        history = history.reset_index()
    return table_observations(_to_arrow(history, "the history"), options, "the history")


def read_questions(
    table: pa.Table, nodes: Sequence[str], described: Nodes = NO_NODES
) -> tuple[Questions, tuple[str, ...]]:
    """Questions from the columns of a table, and all nodes: the known ones first, as they were."""
    named = _named(table, "the questions")
    number = {node: index for index, node in enumerate(nodes)}
    shown = shown_names(described)
    time_s = np.full(table.num_rows, np.nan)
    with explained("the questions", TypeError):
        source, destination = (
            _numbers(named[end].combine_chunks(), end, number, shown) for end in ("src_addr", "dst_addr")
        )
        if "event_time" in named.column_names:
            time_us, missing, bad = time_microseconds(named["event_time"].combine_chunks())
            bad |= ~missing & ((time_us < 0) | (time_us >= MAX_TIME_US))
            if bad.any():
                first = int(np.argmax(bad))
                raise PingLlmError(
                    f"question {first + 1}: {named['event_time'][first]} is not a time between 1970 and 2100"
                )
            time_s = np.where(missing, np.nan, time_us / 1e6)
    all_nodes = tuple(number)
    families, _, _ = parse_nodes(addresses_of(all_nodes, described))
    if len(mixed := np.flatnonzero(of_two_families(families[source], families[destination]))):
        both = " and ".join(all_nodes[end[mixed[0]]] for end in (source, destination))
        raise PingLlmError(f"question {mixed[0] + 1}: {both} are not of one family: no ping goes from one to the other")
    return Questions(source=source, destination=destination, time_s=time_s), all_nodes


def checked_levels(levels: Any) -> list[float]:
    """Levels of quantiles; each gives a column its name, in six digits."""
    try:
        found = list(dict.fromkeys(float(level) for level in levels))
    except (TypeError, ValueError):
        found = [np.nan]
    if len({f"{level:g}" for level in found if 0 < level < 1}) < len(found):
        raise PingLlmError(f"quantile levels {str(levels)[:80]}: write levels between 0 and 1 such as 0.1,0.5,0.9")
    return found


def _numbers(column: Any, name: str, number: dict[str, int], shown: Mapping[str, str]) -> Any:
    """The node of each address or name; one that was never measured becomes a new one."""
    parsed = parse_column(column, name)
    wrong = np.flatnonzero(parsed.family_of_each == UNPARSABLE)
    if len(wrong):
        cell = column[int(wrong[0])].as_py()
        raise PingLlmError(f"question {wrong[0] + 1}: {name} {cell!r} is neither an address nor a name")
    texts = [
        parsed.names[packed.tobytes()] if family == NAMED else format_address(int(family), packed.tobytes())
        for family, packed in zip(parsed.families[:-1], parsed.packed[:-1], strict=True)
    ]
    texts = [shown.get(text, text) for text in texts]
    return np.array([number.setdefault(text, len(number)) for text in texts] + [-1], dtype=np.int64)[parsed.codes]


def _to_arrow(frame: Any, what: str) -> pa.Table:
    if isinstance(frame, pa.Table):
        return frame
    with explained(f"cannot read {what}", TypeError, ValueError):  # Arrow's own errors are such
        if hasattr(frame, "to_arrow"):  # Polars
            return frame.to_arrow()
        if hasattr(frame, "iloc"):  # pandas
            return pa.Table.from_pandas(frame, preserve_index=False)
    raise PingLlmError(f"{what}: expected a data frame of pandas, Polars or Arrow, not {type(frame).__name__}")


def _from_arrow(table: pa.Table, like: Any) -> Any:
    """A data frame of the kind that was given; a pandas index is kept."""
    if isinstance(like, pa.Table):
        return table
    if hasattr(like, "to_arrow"):
        return type(like)(table)
    return table.to_pandas().set_axis(like.index)


def _named(table: pa.Table, what: str) -> pa.Table:
    """The columns that are needed, under the names of the schema; whatever types they have."""
    names = table.column_names
    if len(set(names)) < len(names):
        raise PingLlmError(f"{what}: two columns are called {max(names, key=names.count)!r}: rename or drop one")
    found = question_columns(names, what)
    return table.select(list(found.values())).rename_columns(list(found))
