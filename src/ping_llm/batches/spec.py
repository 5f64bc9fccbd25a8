"""What decides every batch, as one small value: which rows, which seed, which shape. It travels to worker processes."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from ping_llm.batches.mixture import UNMIXED, Mixture, Phase
from ping_llm.core.errors import PingLlmError, one_line
from ping_llm.core.randomness import Ints
from ping_llm.rows.manifest import MANIFEST, Manifest
from ping_llm.storage import locate
from ping_llm.tasks.pool import available_cores
from ping_llm.tokens import TOKEN_VERSION

PIPELINE_VERSION: Final = 1
"""Raised whenever the same spec would give other batches."""

STATE_VERSION: Final = 1

Batch = dict[str, npt.NDArray[np.int32]]
"""`inputs` and `targets`, and for both `_position` and `_segmentation`: each [sequences, length]."""


@dataclass(frozen=True, kw_only=True)
class ContextSettings:
    """How rows become contexts. Part of what a data state is checked against."""

    measurements_per_context: int = 30
    max_contexts: int = 16
    length: int = 1024
    """Tokens of a sequence: no context has more."""

    def per_row(self, counts: npt.ArrayLike) -> Ints:
        """Contexts per epoch of rows with so many measurements."""
        contexts = -(-np.asarray(counts, dtype=np.int64) // self.measurements_per_context)
        return np.minimum(contexts, self.max_contexts)


@dataclass(frozen=True, kw_only=True)
class RowsSpec:
    """One split of one prepared dataset."""

    folder: str
    split: str
    fingerprint: str

    @classmethod
    def find(cls, pattern: str, default_split: str) -> "RowsSpec":
        """From a folder that `prepare` wrote, or from a pattern of its shards such as `rows/train*.arrayrecord`."""
        path = locate(pattern)
        if path.is_dir() or not (path.parent / MANIFEST).exists():
            folder, split, matched = path, default_split, None
        else:
            folder, matched = path.parent, {file.name for file in path.parent.glob(path.name)}
            split = next((s for s in Manifest.load(folder).splits if path.name.startswith(s)), default_split)
        manifest = Manifest.load(folder)
        if split not in manifest.splits:
            raise PingLlmError(f"{folder} has no split {split!r}, only {', '.join(manifest.splits)}")
        info = manifest.splits[split]
        if not info.rows:
            raise PingLlmError(f"the {split} split of {folder} is empty")
        shards = {shard.file for shard in info.shards}
        if matched is not None and matched & shards != shards:
            raise PingLlmError(
                f"{pattern} names {len(matched & shards)} of the {len(shards)} {split} shards; a split is used whole: "
                f"give {folder} or {folder}/{split}*.arrayrecord"
            )
        return cls(folder=str(folder), split=split, fingerprint=info.fingerprint)


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """`batch = f(spec, step)`: everything else (hosts, workers, what was read before) is left out on purpose."""

    rows: tuple[RowsSpec, ...]
    weights: tuple[Fraction, ...] = (Fraction(1),)
    seed: int = 0
    global_batch_size: int = 64
    contexts: ContextSettings = field(default_factory=ContextSettings)
    skip_corrupt_rows: bool = False
    finite: bool = False
    """One epoch of each row set, one after the other, then nothing: for evaluation. Otherwise epochs without end."""

    def identity(self) -> dict[str, Any]:
        """What a data state is checked against. Weights are not part of it: they may change."""
        return {
            "rows": [rows.fingerprint for rows in self.rows],
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            **{f"contexts.{name}": value for name, value in asdict(self.contexts).items()},
            "token_version": TOKEN_VERSION,
            "pipeline_version": PIPELINE_VERSION,
        }


@dataclass(frozen=True, kw_only=True)
class DataState:
    """Where a run is in its data: the next step, and what the steps before it were made from."""

    next_step: int
    identity: Mapping[str, Any]
    mixture: Mixture = UNMIXED

    @classmethod
    def start(cls, spec: DataSpec) -> "DataState":
        return cls(next_step=0, identity=spec.identity(), mixture=Mixture.of(spec.weights))

    def to_json(self) -> str:
        return json.dumps({"version": STATE_VERSION, **asdict(self), "mixture": asdict(self.mixture)["phases"]})

    @classmethod
    def from_json(cls, text: str) -> "DataState":
        try:
            value = json.loads(text)
            if value["version"] != STATE_VERSION:
                raise PingLlmError(f"data state has version {value['version']}; this program reads {STATE_VERSION}")
            mixture = Mixture(TypeAdapter(tuple[Phase, ...]).validate_python(value["mixture"]))
            return cls(next_step=int(value["next_step"]), identity=dict(value["identity"]), mixture=mixture)
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

    def resume(self, spec: DataSpec, *, allow_change: bool = False) -> "DataState":
        """This state for another spec. What differs is an error, unless it is explicitly allowed."""
        identity = spec.identity()
        if not allow_change:
            self.check(identity)
        if identity["rows"] != self.identity.get("rows") or len(spec.rows) != len(self.mixture.phases[0].shares):
            mixture = Mixture.of(spec.weights)
        else:
            mixture = self.mixture.changed(spec.weights, self.next_step * spec.global_batch_size)
        return DataState(next_step=self.next_step, identity=identity, mixture=mixture)


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
