"""What decides every batch, as one small value that is sent to workers: which sources, which seed, which shape."""

import json
from collections.abc import Iterator, Mapping, Sized
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from ping_llm.batches.mixture import UNMIXED, Mixture, Phase
from ping_llm.core.errors import PingLlmError, one_line
from ping_llm.tasks.pool import available_cores

if TYPE_CHECKING:
    from ping_llm.batches.batch import PackedTokens, Stages

PIPELINE_VERSION: Final = 1  # raised whenever the same spec would give other batches
STATE_VERSION: Final = 1

Batch = dict[str, npt.NDArray[np.int32]]
"""`inputs` and `targets`, and for both `_position` and `_segmentation`: each [sequences, length]."""


class SequenceSource(Protocol):
    """Sequences by number, in epochs without end."""

    @property
    def sequences_per_epoch(self) -> int: ...

    @property
    def left_out(self) -> Sized:
        """Damaged records that were skipped so far."""

    def packed(self, sequences: range) -> "PackedTokens":
        """The segments of these sequences; `sequence` of the result counts from the first of them."""

    def max_segments(self, sequences: range) -> int:
        """An upper bound on the segments of each of these sequences."""

    def explain(self, sequence: int) -> dict[str, Any]:
        """Where a sequence comes from: `epoch`, `block`, `index_in_block` and `segments`, each with its `tokens`."""


class SourceSpec(Protocol):
    """The description of one source of sequences: a small, picklable value that every reading process opens."""

    @property
    def fingerprint(self) -> str:
        """Differs whenever the sequences differ."""

    def open(self, spec: "DataSpec", stages: "Stages") -> SequenceSource: ...


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """`batch = f(spec, step)`: everything else (hosts, workers, what was read before) is left out on purpose.

    `settings` are whatever else decides the sequences of all sources, by name; a data state is checked against them.
    `stages` names the steps of making a batch and what they do, for reports. A `finite` spec gives one epoch of each
    source, one after the other, and then ends: for evaluation. `schedule` lists new weights by the step that they
    begin at, in rising order. `skipped` lists ranges of planned steps (first, end) to skip: in order, not adjacent.
    """

    sources: tuple[SourceSpec, ...]
    weights: tuple[Fraction, ...] = (Fraction(1),)
    seed: int = 0
    global_batch_size: int = 64
    length: int = 1024  # tokens per sequence
    settings: Mapping[str, Any] = field(default_factory=dict)
    stages: Mapping[str, str] = field(default_factory=dict)
    finite: bool = False
    schedule: tuple[tuple[int, tuple[Fraction, ...]], ...] = ()
    skipped: tuple[tuple[int, int], ...] = ()

    def planned(self, step: int) -> int:
        """The planned step whose batch a training step gets."""
        for begin, end in self.skipped:
            if step >= begin:
                step += end - begin
        return step

    def mixture(self, before: Mixture | None = None, step: int = 0) -> Mixture:
        """Which source each sequence is drawn from. What `before` says about planned steps before `step` stays."""
        now = [weights for begin, weights in ((0, self.weights), *self.schedule) if begin <= step][-1]
        size = self.global_batch_size
        mixture = Mixture.of(now) if before is None else before.until(step * size).changed(now, step * size)
        for begin, weights in self.schedule:
            if begin > step:
                mixture = mixture.changed(weights, begin * size)
        return mixture

    def identity(self) -> dict[str, Any]:
        """What a data state is checked against. Weights are not part of it: they may change."""
        return {
            "sources": [source.fingerprint for source in self.sources],
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "length": self.length,
            **self.settings,
            "pipeline_version": PIPELINE_VERSION,
        }


def host_share(sequences: int, host: int, hosts: int) -> range:
    """The sequences of a global batch that one of several hosts makes."""
    if sequences % hosts:
        raise PingLlmError(f"a global batch of {sequences} cannot be shared evenly by {hosts} hosts")
    return range(host * sequences // hosts, (host + 1) * sequences // hosts)


@dataclass(frozen=True, kw_only=True)
class DataState:
    """Where a run is in its data: the next step, and what the steps before it were made from."""

    next_step: int
    identity: Mapping[str, Any]
    mixture: Mixture = UNMIXED
    skipped: tuple[tuple[int, int], ...] = ()  # planned steps that were, or will be, skipped

    @classmethod
    def start(cls, spec: DataSpec) -> "DataState":
        return cls(next_step=0, identity=spec.identity(), mixture=spec.mixture(), skipped=spec.skipped)

    def to_json(self) -> str:
        return json.dumps({"version": STATE_VERSION, **asdict(self), "mixture": asdict(self.mixture)["phases"]})

    @classmethod
    def from_json(cls, text: str) -> "DataState":
        try:
            value = json.loads(text)
            if value["version"] != STATE_VERSION:
                raise PingLlmError(f"data state has version {value['version']}; this program reads {STATE_VERSION}")
            mixture = Mixture(TypeAdapter(tuple[Phase, ...]).validate_python(value["mixture"]))
            skipped = tuple((int(begin), int(end)) for begin, end in value.get("skipped", ()))
            return cls(
                next_step=int(value["next_step"]), identity=dict(value["identity"]), mixture=mixture, skipped=skipped
            )
        except (ValueError, KeyError, TypeError) as error:
            raise PingLlmError(f"not a data state: {type(error).__name__}: {one_line(error)}") from None

    def check(self, identity: Mapping[str, Any]) -> None:
        """An error that says what differs, if this state belongs to other data."""
        different = [
            f"{name}: {self.identity.get(name)!r} then, {identity.get(name)!r} now"
            for name in sorted({*self.identity, *identity})
            if self.identity.get(name) != identity.get(name)
        ]
        if different:
            raise PingLlmError(
                "the data is not what this run was trained on: "
                + "; ".join(different)
                + ". Restore it, or set allow_data_change=true to continue with other batches"
            )

    def resume(self, spec: DataSpec, *, allow_change: bool = False) -> tuple[DataSpec, "DataState"]:
        """The spec and the state to continue with. Data that differs is an error unless `allow_change` is set.

        Weights may change and sources may be added; each continues where it was. Sources keep their old order, in
        whatever order they are named now. Steps that are still to come may be skipped, or no longer be.
        """
        spec = replace(spec, skipped=self._skipped(spec))
        before, now = list(self.identity.get("sources", [])), spec.identity()["sources"]
        gone = [source for source in before if source not in now]
        if gone and not allow_change:
            raise PingLlmError(
                f"{len(gone)} of the {len(before)} sources that this run was trained on are not in the blend any more, "
                "or their files have changed: keep them, with weight 0 if they are not wanted; or set "
                "allow_data_change=true to continue with other batches"
            )
        if gone or not before:
            if not allow_change:
                self.check(spec.identity())
            return spec, replace(DataState.start(spec), next_step=self.next_step)
        if now[: len(before)] != before:
            order = [*map(now.index, before), *(number for number, source in enumerate(now) if source not in before)]
            sources, weights, *later = (
                tuple(values[number] for number in order)
                for values in (spec.sources, spec.weights, *(weights for _, weights in spec.schedule))
            )
            schedule = tuple(zip((step for step, _ in spec.schedule), later, strict=True))
            spec = replace(spec, sources=sources, weights=weights, schedule=schedule)
        identity = spec.identity()
        if not allow_change:
            replace(self, identity={**self.identity, "sources": identity["sources"]}).check(identity)
        new = (0,) * (len(now) - len(before))
        phases = tuple(Phase(p.start, p.shares + new, p.given + new) for p in self.mixture.phases)
        mixture = spec.mixture(Mixture(phases), spec.planned(self.next_step))
        return spec, replace(self, identity=identity, mixture=mixture, skipped=spec.skipped)

    def _skipped(self, spec: DataSpec) -> tuple[tuple[int, int], ...]:
        """What was skipped stays skipped; what has been trained on cannot be."""
        next_step = replace(spec, skipped=self.skipped).planned(self.next_step)
        done = tuple(steps for steps in self.skipped if steps[0] < next_step)
        for begin, end in spec.skipped:
            if begin < next_step and (begin, end) not in done:
                raise PingLlmError(
                    f"steps {begin:,} to {end:,} cannot be skipped: the run has been trained on those before "
                    f"{next_step:,}; continue from a checkpoint before them"
                )
        return tuple(sorted({*done, *spec.skipped}))


class EvalLoader(Protocol):
    """This host's part of each global batch in turn: int32 arrays by name, in host memory."""

    def __next__(self) -> Batch: ...

    def max_segments(self, step: int) -> int:
        """An upper bound on the segments of each sequence in the step's global batch; the same on every host."""

    def close(self) -> None:
        """End worker processes, release memory, close files."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any, /) -> None:
        self.close()


class TrainLoader(EvalLoader, Protocol):
    """The same without end, and with a state that a run stores and resumes from."""

    def state(self) -> DataState: ...


_WORKER_MB: Final = 300  # a worker's own memory: Python with its imports, and a block of the plan


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """How batches are delivered. None of this changes what is in them."""

    worker_count: int = -1  # worker processes; -1: chosen automatically, 0: batches are made in this process
    buffer_size: int = -1  # batches that each worker makes ahead; -1: chosen automatically
    ram_budget_mb: int = 4096
    debug: bool = False  # log the time of each stage every minute, with the bottleneck and what to change
    visualization_dir: str = ""  # folder for the pipeline graph and its numbers, written every minute and at the end
    host: int = 0
    hosts: int = 1

    def resolved(self, batch_bytes: int) -> "LoaderSettings":
        """With -1 replaced: as many workers as half the cores, and buffers for half of the memory budget."""
        workers, buffer = self.worker_count, self.buffer_size
        if workers < 0:
            affordable = max(1, self.ram_budget_mb // 2 // _WORKER_MB)
            workers = max(1, min(available_cores() // 2, affordable, 8))
        if buffer < 1:
            free = self.ram_budget_mb * 2**20 // 2
            buffer = int(np.clip(free // max(1, batch_bytes * max(1, workers)), 1, 32))
        return replace(self, worker_count=workers, buffer_size=buffer)
