"""What a text pipeline did: the report of the pipeline, in the words of text."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

from ping_llm.batches.batch import PackedTokens, Stages
from ping_llm.batches.loader import Loader, Source
from ping_llm.batches.mixture import Mixture, Phase
from ping_llm.batches.report import PipelineReport
from ping_llm.batches.spec import ContextSettings, DataSpec, DataState, LoaderSettings
from ping_llm.core.errors import PingLlmError
from ping_llm.core.randomness import Ints
from ping_llm.data.text.arrayrecord import EMPTY, TEXT_VERSION, Documents, PackSettings, TextFiles, TextPlan, pack
from ping_llm.data.text.tokenizer import TokenizerSpec, Tokens


class TextReport(PipelineReport):
    meaning: ClassVar[Mapping[str, str]] = {
        "plan": "which documents come next",
        "read": "get them from their files",
        "encode": "tokenise them",
        "arrange": "put sequences together",
    }

    @property
    def advice(self) -> str:
        if self.bottleneck == "plan":
            return "raise grain_worker_count: this runs on as many cores as there are"
        return super().advice.replace("rows are", "files are")


# What decides every batch of ArrayRecord text, and what becomes of a blend when a run goes on with another one.


@dataclass(frozen=True, kw_only=True)
class TextSpec:
    """`batch = f(spec, step)`, as `DataSpec` is for probe rows."""

    sources: tuple[TextFiles, ...]
    weights: tuple[Fraction, ...]
    tokenizer: TokenizerSpec
    tokenizer_digest: str
    packing: PackSettings
    column: str = "text"
    seed: int = 0
    global_batch_size: int = 64
    epochs: int = -1

    @property
    def chunk(self) -> int:
        """Sequences that are taken from a block in one go: four chunks make a batch."""
        return max(8, self.global_batch_size // 4)

    def identity(self) -> dict[str, Any]:
        """What a data state is checked against. Weights are not part of it: they may change."""
        return {
            "dataset_type": "grain",
            "sources": [source.fingerprint for source in self.sources],
            "tokenizer": self.tokenizer_digest,
            "add_bos": self.tokenizer.add_bos,
            "add_eos": self.tokenizer.add_eos,
            "column": self.column,
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "length": self.packing.length,
            "most_segments": self.packing.most_segments,
            "text_version": TEXT_VERSION,
        }


def begin(spec: TextSpec) -> DataState:
    return DataState(next_step=0, identity=spec.identity(), mixture=Mixture.of(spec.weights))


def go_on(state: DataState, spec: TextSpec, *, allow_change: bool) -> tuple[TextSpec, DataState]:
    """The spec and the state to go on with. Weights may differ, and sources may be added: each goes on where it was.

    Sources keep the places that they had, whatever the order in which they are named now.
    """
    before = list(state.identity.get("sources", []))
    now = {source.fingerprint: (source, weight) for source, weight in zip(spec.sources, spec.weights, strict=True)}
    gone = [number for number, source in enumerate(before) if source not in now]
    if gone and not allow_change:
        raise PingLlmError(
            f"{len(gone)} of the {len(before)} sources that this run was trained on are not in the blend any more, "
            "or their files have changed: keep them, with weight 0 if they are not wanted; or set "
            "allow_data_change=true to go on with other batches"
        )
    if allow_change and (gone or not before):
        return spec, replace(begin(spec), next_step=state.next_step)
    order = [*before, *(source for source in now if source not in before)]
    spec = replace(
        spec, sources=tuple(now[source][0] for source in order), weights=tuple(now[source][1] for source in order)
    )
    wanted = spec.identity()
    if not allow_change:
        DataState(next_step=0, identity={**state.identity, "sources": order}, mixture=state.mixture).check(wanted)
    new = (0,) * (len(order) - len(before))
    phases = tuple(Phase(p.start, p.shares + new, p.given + new) for p in state.mixture.phases)
    mixture = Mixture(phases).changed(spec.weights, state.next_step * spec.global_batch_size)
    return spec, DataState(next_step=state.next_step, identity=wanted, mixture=mixture)


class TextSource:
    """A spec brought to life. Files are opened at first use, so it can be sent to a worker process before."""

    corrupt_rows = 0
    """A damaged file ends the run: nothing is left out."""

    def __init__(self, spec: TextSpec, mixture: Mixture) -> None:
        self.spec = spec
        self.mixture = mixture
        self.stages = Stages()
        self._plans: tuple[TextPlan, ...] | None = None

    @property
    def plans(self) -> tuple[TextPlan, ...]:
        if self._plans is None:
            s = self.spec
            self._plans = tuple(
                TextPlan(
                    Documents(source, s.column),
                    s.tokenizer,
                    s.packing,
                    seed=s.seed,
                    chunk=s.chunk,
                    stages=self.stages,
                )
                for source in s.sources
            )
        return self._plans

    def packed(self, step: int, begin: int, end: int) -> PackedTokens:
        """Sequences `begin` to `end` of the global batch of a step."""
        first = step * self.spec.global_batch_size
        parts = [self._sequence(first + number) for number in range(begin, end)]
        with self.stages("arrange"):
            return pack(parts)

    def _sequence(self, number: int) -> tuple[Tokens, Ints]:
        source, within = self.mixture.locate(number)
        plan = self.plans[source]
        if 0 < self.spec.epochs <= within // plan.sequences_per_epoch:
            return EMPTY
        return plan.sequence(within)


# The loader of ArrayRecord text: that of probe rows, with worker processes that tokenise documents instead.


class TextLoader(Loader):
    """As a `Loader`: this host's part of each global batch, from a step on, the same for any hosts and workers."""

    stages = ("plan", "read", "encode", "arrange")

    def __init__(self, spec: TextSpec, settings: LoaderSettings, state: DataState | None = None) -> None:
        self.text = spec
        # What the loader itself looks at is the shape of a batch; rows there are none.
        shape = DataSpec(
            rows=(),
            global_batch_size=spec.global_batch_size,
            contexts=ContextSettings(length=spec.packing.length),
        )
        super().__init__(shape, settings, state or begin(spec))

    def most_segments(self, step: int) -> int:
        return self.text.packing.most_segments

    def restore(self, state: DataState, *, allow_change: bool = False) -> None:
        spec, resumed = go_on(state, self.text, allow_change=allow_change)
        self.close()
        self.text, self._state = spec, resumed

    def make_report(self) -> TextReport:
        return TextReport(stages=self.stages, workers=self.settings.worker_count)

    def make_source(self) -> Source:
        return TextSource(self.text, self._state.mixture)
