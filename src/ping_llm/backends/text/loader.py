"""The loader of ArrayRecord text: that of probe rows, with worker processes that tokenise documents instead."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from ping_llm.backends.text.report import TextReport
from ping_llm.backends.text.spec import TextSource, TextSpec, begin, go_on
from ping_llm.pipeline.batch import Batch, PackedTokens, expand
from ping_llm.pipeline.contexts import ContextSettings
from ping_llm.pipeline.loader import Loader, LoaderSettings, _grain_iterator, _prepare_worker
from ping_llm.pipeline.spec import DataSpec, DataState

_STAGES: Final = ("plan", "read", "encode", "arrange")
_ENDLESS: Final = 1 << 40
_SHOW_EVERY_S: Final = 60.0


class TextLoader(Loader):
    """As a `Loader`: this host's part of each global batch, from a step on, the same for any hosts and workers."""

    def __init__(self, spec: TextSpec, settings: LoaderSettings, state: DataState | None = None) -> None:
        self.text = spec
        # What the loader itself looks at is the shape of a batch; rows there are none.
        shape = DataSpec(
            rows=(),
            global_batch_size=spec.global_batch_size,
            contexts=ContextSettings(length=spec.packing.length),
        )
        super().__init__(shape, settings, state or begin(spec))
        self.report = TextReport(stages=_STAGES, workers=self.settings.worker_count)

    def most_segments(self, step: int) -> int:
        return self.text.packing.most_segments

    def restore(self, state: DataState, *, allow_change: bool = False) -> None:
        spec, resumed = go_on(state, self.text, allow_change=allow_change)
        self.close()
        self.text, self._state = spec, resumed

    def __next__(self) -> Batch:
        step = self._state.next_step
        asked = time.perf_counter()
        element = self._next_element()
        waited = time.perf_counter() - asked
        packed, costs = _unpack(np.array(element))  # a copy: what came through shared memory is given back at once
        length = self.text.packing.length
        batch = expand(packed, self.batch_size, length)
        real = len(packed.tokens)
        padding = self.batch_size * length - real
        self.report.add(wait_s=waited, stage_s=costs, tokens=real, padding=padding, corrupt_rows=0)
        self._state = replace(self._state, next_step=step + 1)
        if time.monotonic() - self._shown > _SHOW_EVERY_S:
            self._show()
        return batch

    def _start(self) -> Any:
        host, size = self.settings.host, self.batch_size
        source = TextSource(self.text, self._state.mixture)
        elements = _Elements(source, self._state.next_step, host * size, (host + 1) * size, self._memory_name)
        if self.settings.worker_count == 0:
            return iter(elements)
        return _grain_iterator(cast(Any, elements), self.settings.worker_count, self.settings.buffer_size)


class _Elements:
    """What Grain sees: an endless list of batches, of which it may ask for any, in any process."""

    def __init__(self, source: TextSource, first_step: int, begin: int, end: int, memory_name: str) -> None:
        self._source = source
        self._first_step = first_step
        self._range = begin, end
        self._memory_name = memory_name
        self._prepared = False

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> npt.NDArray[np.uint8]:
        if not self._prepared:
            _prepare_worker(self._memory_name)
            self._prepared = True
        seconds = self._source.stages.seconds
        seconds.clear()
        packed = self._source.packed(self._first_step + int(index), *self._range)
        return _pack(packed, np.array([seconds.get(name, 0.0) for name in _STAGES]))

    def __iter__(self) -> Iterator[npt.NDArray[np.uint8]]:
        return map(self.__getitem__, range(_ENDLESS))


def _pack(packed: PackedTokens, costs: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    head = np.array([len(packed.sizes), len(packed.tokens)], dtype=np.int64)
    parts = (head, costs, packed.sizes, packed.sequence, packed.tokens)
    return np.concatenate([part.view(np.uint8) for part in parts])


def _unpack(data: npt.NDArray[np.uint8]) -> tuple[PackedTokens, npt.NDArray[np.float64]]:
    segments, tokens = data[:16].view(np.int64).tolist()
    ends = np.cumsum([16, 8 * len(_STAGES), 4 * segments, 4 * segments, 4 * tokens]).tolist()
    costs, sizes, sequence, spelled = (data[begin:end] for begin, end in itertools.pairwise(ends))
    text: Any = spelled.view(np.uint32)  # two bytes are enough for probe rows only
    return PackedTokens(tokens=text, sizes=sizes.view(np.int32), sequence=sequence.view(np.int32)), costs.view(
        np.float64
    )
