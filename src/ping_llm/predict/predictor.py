"""One interface for both models: from known measurements and questions to distributions.

>>> predictor = Predictor.from_pretrained()                       # the completer that comes with the package
>>> predictor.predict_df(questions, history="my_pings.csv")       # a data frame with quantiles
>>> predictor.predict(known, questions, nodes).interval(0.9)      # distributions
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from ping_llm.batches.spec import RowsSpec
from ping_llm.config import parse_blend
from ping_llm.core.console import Advance
from ping_llm.core.distribution import RttDistribution
from ping_llm.core.errors import PingLlmError
from ping_llm.core.observations import Floats, Ints, Observations, Questions
from ping_llm.models.completer import Completer, PredictionSettings
from ping_llm.models.completer.context import Known
from ping_llm.predict.language_model import LanguageModel
from ping_llm.predict.prompts import Histories, prompts_for
from ping_llm.predict.scoring import surprises
from ping_llm.predict.tables import History, answers_table, asked_of, like, measured_of, table_of
from ping_llm.prior.shared_prefixes import kin_of
from ping_llm.rows.measurement_set import MeasurementSet, read_observations, rows_observations
from ping_llm.runs.task import completer_settings
from ping_llm.runs.trained import Trained, load_trained


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A trained model that answers. Make one by `from_pretrained`."""

    trained: Trained
    settings: PredictionSettings = field(default_factory=PredictionSettings)
    """Of the completer; the language model has nothing to set."""

    @classmethod
    def from_pretrained(cls, where: Path | str | None = None, **settings: Any) -> Self:
        """A run, an exported folder, or (None) the completer that comes with the package.

        `settings` are those of `PredictionSettings`, such as `votes=4` or `context=1024`. Eight questions of one source
        and time share a context, unless `questions_per_context` says otherwise.
        """
        shared = {"questions_per_context": 8}
        return cls(trained=load_trained(where), settings=PredictionSettings(**(shared | settings)))

    @property
    def name(self) -> str:
        return Path(self.trained.where).name

    def learnt_from(self) -> list[MeasurementSet]:
        """The real measurements that the model was trained on, read again from where they were."""
        files = self.trained.config.network_train_files
        if not files:
            return []
        if self.trained.is_completer:
            return [read_observations([files])]
        folders = (RowsSpec.find(pattern, "train").folder for pattern, _ in parse_blend(files))
        return [rows_observations(Path(folder), "train") for folder in folders]

    @cached_property
    def model(self) -> Completer | LanguageModel:
        if not self.trained.is_completer:
            return LanguageModel.of(self.trained)
        settings = completer_settings(self.trained.config)
        return Completer(settings=settings, weights=self.trained.weights, prediction=self.settings)

    @property
    def language_model(self) -> LanguageModel:
        """For what only the language model can be asked: addresses, times, the likelihood of a whole measurement."""
        if isinstance(self.model, LanguageModel):
            return self.model
        raise PingLlmError(f"{self.trained.where} is a completer: it knows RTTs only. This asks for a language model")

    def predict(
        self, known: Observations, questions: Questions, nodes: Sequence[str], advance: Advance | None = None
    ) -> RttDistribution:
        """The result of each question, from what was known strictly before its time (NaN: from everything).

        `nodes` are the addresses of the nodes' numbers.
        """
        if isinstance(self.model, Completer):
            return self.model.predict(known, questions, nodes, advance)
        ((_, answers),) = self.in_parts(known, questions, nodes, advance)
        return answers

    def in_parts(
        self, known: Observations, questions: Questions, nodes: Sequence[str], advance: Advance | None = None
    ) -> Iterator[tuple[Ints, RttDistribution]]:
        """The same as they come: rows of the questions, and their answers. A million at once would fill the memory."""
        if isinstance(self.model, Completer):
            yield from self.model.in_parts(known, questions, nodes, advance)
            return
        length = self.trained.config.max_target_length
        yield np.arange(len(questions)), self.model.forecast(prompts_for(known, questions, nodes, length))
        if advance is not None:
            advance(len(questions))

    def context(self, known: Observations, question: Questions, nodes: Sequence[str]) -> Ints:
        """Which known measurements the answer to one question is drawn from, most telling first.

        The completer chooses them for the pair; the language model takes the latest of the source, as many as fit.
        """
        source, destination, time_s = (column[0].item() for column in vars(question).values())
        if isinstance(self.model, Completer):
            index = Known(known, self.settings.context - 1, kin_of(nodes))
            return index.given[index.choose(source, question.destination, time_s)]
        histories = Histories(known, nodes)
        kept = histories.prompt(source, destination, time_s, self.trained.config.max_target_length).measurements
        _, places = histories.row(source)
        before = places if np.isnan(time_s) else places[known.time_s[places] < time_s]
        return before[::-1][:kept]

    def surprise(self, measured: MeasurementSet, which: Ints | None = None, advance: Advance | None = None) -> Floats:
        """Bits of the results of some measurements (None: of all), each given everything that was measured before it.

        The completer looks at all sources, in a context for each measurement; the language model at the source's own
        measurements, which it reads in one go.
        """
        known = measured.observations
        which = np.arange(len(known)) if which is None else which
        if isinstance(self.model, Completer):
            answers = self.predict(known, known.questions.take(which), measured.nodes, advance)
            return answers.bits(known.rtt_ms[which])
        histories = Histories(known, measured.nodes)
        found = [histories.row(source) for source in np.unique(known.source[which]).tolist()]
        timed = not np.isnan(known.time_s).any()
        bits = np.full(len(known), np.nan)
        read = surprises(self.model, [row for row, _ in found], timed=timed)
        for (_, places), of_source in zip(found, read, strict=True):
            bits[places] = of_source.result
        if advance is not None:
            advance(len(which))
        return bits[which]

    def predict_df(
        self, df: Any, *, history: History | None = None, quantile_levels: Sequence[float] = (0.1, 0.5, 0.9)
    ) -> Any:
        """A data frame of questions, with the answers in new columns.

        `df` has the columns `src_addr` and `dst_addr`, and may have `event_time`; it is one of pandas, Polars or Arrow,
        and so is the answer. `history` holds known measurements: such a data frame with `rtt` too, or files.

        New columns: `p_failed`, `predictions` (the median RTT in ms), and one for each level, named like "0.1".
        """
        measured = measured_of(history)
        table = table_of(df)
        questions, nodes = asked_of(table, measured.nodes)
        answers = self.in_parts(measured.observations, questions, nodes)
        return like(df, answers_table(table, answers, quantile_levels))
