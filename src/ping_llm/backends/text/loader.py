"""The loader of ArrayRecord text: that of probe rows, with worker processes that tokenise documents instead."""

from ping_llm.backends.text.report import TextReport
from ping_llm.backends.text.spec import TextSource, TextSpec, begin, go_on
from ping_llm.pipeline.contexts import ContextSettings
from ping_llm.pipeline.loader import Loader, LoaderSettings
from ping_llm.pipeline.spec import DataSpec, DataState
from ping_llm.pipeline.transport import Source


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

    def _make_report(self) -> TextReport:
        return TextReport(stages=self.stages, workers=self.settings.worker_count)

    def _make_source(self) -> Source:
        return TextSource(self.text, self._state.mixture)
