"""Which probe rows batches are made of, and how rows become contexts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ping_llm.batches.spec import DataSpec
from ping_llm.core.errors import PingLlmError
from ping_llm.core.randomness import Ints
from ping_llm.rows.manifest import MANIFEST, Manifest
from ping_llm.storage import locate
from ping_llm.tokens import TOKEN_VERSION

if TYPE_CHECKING:
    from ping_llm.batches.batch import Stages
    from ping_llm.contexts.source import RowSequences

STAGES: Final = {  # of making a batch, in the workers
    "plan": "which samples share a sequence → int64 numbers",
    "sample": "draw measurements from windows → int64 indices",
    "read": "pick measurements from mapped rows → columns",
    "fill": "as many measurements as fit → int64 indices",
    "encode": "measurements in their order to tokens → uint16 tokens",
}


@dataclass(frozen=True, kw_only=True)
class ContextSettings:
    """How rows become contexts. Part of what a data state is checked against."""

    measurements_per_context: int = 30
    max_contexts: int = 16  # per row and epoch
    length: int = 1024  # tokens of a sequence: no context has more
    result_last: float = 0.0  # share of contexts whose measurements all end with the result, as a query for one does

    def per_row(self, counts: npt.ArrayLike) -> Ints:
        """Contexts per epoch of rows with these numbers of measurements."""
        contexts = -(-np.asarray(counts, dtype=np.int64) // self.measurements_per_context)
        return np.minimum(contexts, self.max_contexts)


@dataclass(frozen=True, kw_only=True)
class RowsSpec:
    """One split of one prepared dataset."""

    folder: str
    split: str
    fingerprint: str
    contexts: ContextSettings = field(default_factory=ContextSettings)
    skip_corrupt_rows: bool = False

    @classmethod
    def find(cls, pattern: str, default_split: str, **settings: Any) -> "RowsSpec":
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
        return cls(folder=str(folder), split=split, fingerprint=info.fingerprint, **settings)

    def open(self, spec: DataSpec, stages: "Stages") -> "RowSequences":
        from ping_llm.contexts.source import RowSequences  # which loads what is compiled

        return RowSequences.of(self, spec.seed, stages)


def data_spec(rows: Sequence[RowsSpec], **settings: Any) -> DataSpec:
    """What decides every batch of probe rows. All rows share their context settings; `settings` go to `DataSpec`."""
    contexts = {f"contexts.{name}": value for name, value in asdict(rows[0].contexts).items() if name != "length"}
    return DataSpec(
        sources=tuple(rows),
        length=rows[0].contexts.length,
        settings={**contexts, "token_version": TOKEN_VERSION},
        stages=STAGES,
        **settings,
    )
