"""The product's own loader."""

from peer_common import PREFETCH, Batch, Task
from ping_llm.batches.loader import Loader
from ping_llm.batches.spec import DataState, LoaderSettings
from ping_llm.contexts.spec import ContextSettings, RowsSpec, data_spec


class OurLoader:
    def __init__(self, task: Task, workers: int, state: str | None, *, resumable: bool) -> None:
        rows = RowsSpec.find(task.rows, "train", contexts=ContextSettings(length=task.length))
        spec, resumed = data_spec([rows], seed=task.seed, global_batch_size=task.sequences), None
        if state:
            spec, resumed = DataState.from_json(state).resume(spec)
        self._loader = Loader(spec, LoaderSettings(worker_count=workers, buffer_size=PREFETCH), resumed)

    def __next__(self) -> Batch:
        return next(self._loader)

    def state(self) -> str:
        return self._loader.state().to_json()

    def close(self) -> None:
        self._loader.close()
