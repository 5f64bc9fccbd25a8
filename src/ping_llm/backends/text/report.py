"""What a text pipeline did: the report of the pipeline, in the words of text."""

from collections.abc import Mapping
from typing import ClassVar

from ping_llm.pipeline.report import PipelineReport


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
