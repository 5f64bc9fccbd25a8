"""What decides every batch, as one small value: which sources, which seed, which shape. It travels to workers."""

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

PIPELINE_VERSION: Final = 1
"""Raised whenever the same spec would give other batches."""

STATE_VERSION: Final = 1

Batch = dict[str, npt.NDArray[np.int32]]
"""`inputs` and `targets`, and for both `_position` and `_segmentation`: each [sequences, length]."""


class SequenceSource(Protocol):
    """Sequences by number, in epochs without end."""

    @property
    def sequences_per_epoch(self) -> int: ...

    @property
    def left_out(self) -> Sized:
        """Damaged records that were passed over so far."""

    def packed(self, sequences: range) -> "PackedTokens":
        """The segments of these sequences; `sequence` of the result counts from the first of them."""

    def max_segments(self, sequences: range) -> int:
        """None of these sequences has more."""

    def explain(self, sequence: int) -> dict[str, Any]:
        """Where a sequence comes from: `epoch`, `block`, `index_in_block`, and of each of its `segments` at least the
        number of `tokens`."""


class SourceSpec(Protocol):
    """What one source of sequences is, as a small value. It is opened in the processes that read."""

    @property
    def fingerprint(self) -> str:
        """Another one, if it would give other sequences."""

    def open(self, spec: "DataSpec", stages: "Stages") -> SequenceSource: ...


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """`batch = f(spec, step)`: everything else (hosts, workers, what was read before) is left out on purpose."""

    sources: tuple[SourceSpec, ...]
    weights: tuple[Fraction, ...] = (Fraction(1),)
    seed: int = 0
    global_batch_size: int = 64
    length: int = 1024
    """Tokens of a sequence."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else decides the sequences of all sources, by name: a data state is checked against it."""
    stages: Mapping[str, str] = field(default_factory=dict)
    """What is done to make a batch, and what that means, for reports."""
    finite: bool = False
    """One epoch of each source, one after the other, then nothing: for evaluation. Otherwise epochs without end."""
    schedule: tuple[tuple[int, tuple[Fraction, ...]], ...] = ()
    """Steps, in rising order, from which on the weights are others."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Planned steps that are passed over, from and to: in order, and apart from each other."""

    def planned(self, step: int) -> int:
        """The planned step that a step of training takes its batch from."""
        for begin, end in self.skipped:
            if step >= begin:
                step += end - begin
        return step

    def mixture(self, before: Mixture | None = None, step: int = 0) -> Mixture:
        """What is drawn from which source; up to a planned step it is what it was before."""
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


@dataclass(frozen=True, kw_only=True)
class DataState:
    """Where a run is in its data: the next step, and what the steps before it were made from."""

    next_step: int
    identity: Mapping[str, Any]
    mixture: Mixture = UNMIXED
    skipped: tuple[tuple[int, int], ...] = ()
    """Planned steps that were, or will be, passed over."""

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
        """The spec and the state to continue with. What differs is an error, unless it is explicitly allowed.

        Weights may differ, and sources may be added: each continues where it was. They keep the order that they had,
        whatever the order in which they are named now. Steps that are still to come may be skipped, or no longer.
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
    """This host's part of one global batch after the other: int32 arrays by name, in host memory."""

    def __next__(self) -> Batch: ...

    def max_segments(self, step: int) -> int:
        """No sequence of the step's global batch has more segments: the same number on every host."""

    def close(self) -> None:
        """End processes, give back memory, close files."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any, /) -> None:
        self.close()


class TrainLoader(EvalLoader, Protocol):
    """The same without end, and with a state: what a run stores, and resumes from."""

    def state(self) -> DataState: ...


_WORKER_MB: Final = 300
"""A worker's own memory: Python with its imports, and a block of the plan."""


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """How batches are delivered. None of this changes what is in them."""

    worker_count: int = -1
    """Worker processes: -1 chooses, 0 makes batches in this process."""
    buffer_size: int = -1
    """Batches that each worker makes ahead: -1 chooses."""
    ram_budget_mb: int = 4096
    debug: bool = False
    """Log the time of each stage every minute, with the bottleneck and what to change."""
    visualization_dir: str = ""
    """Folder for the pipeline graph and its numbers, written every minute and at the end."""
    host: int = 0
    hosts: int = 1

    def resolved(self, batch_bytes: int) -> "LoaderSettings":
        """With the choices made: half the cores, and buffers for half of the memory that workers leave."""
        workers, buffer = self.worker_count, self.buffer_size
        if workers < 0:
            affordable = max(1, self.ram_budget_mb // 2 // _WORKER_MB)
            workers = max(1, min(available_cores() // 2, affordable, 8))
        if buffer < 1:
            free = self.ram_budget_mb * 2**20 // 2
            buffer = int(np.clip(free // max(1, batch_bytes * max(1, workers)), 1, 32))
        return replace(self, worker_count=workers, buffer_size=buffer)
