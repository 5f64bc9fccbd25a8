"""What a text pipeline did: the report of the pipeline, in the words of text."""

from typing import Final

from ping_llm.pipeline.report import PipelineReport

_MEANING: Final = {
    "plan": "which documents come next",
    "read": "get them from their files",
    "encode": "tokenise them",
    "arrange": "put sequences together",
}


class TextReport(PipelineReport):
    def table(self) -> str:
        """For the log: one line a stage, then the verdict."""
        value = self.to_json()
        lines = [
            f"pipeline: {value['batches']} batches, {value['real_tokens_per_s']:,} tokens/s, {self.workers} worker(s)"
        ]
        for name, stage in value["stages"].items():
            lines.append(f"  {name:8} {stage['ms_per_batch']:9.2f} ms/batch {stage['share']:6.0%}  {_MEANING[name]}")
        lines.append(
            f"  waiting for data: {value['wait_share']:.1%} of the time; padding {value['padding_fraction']:.2%}"
        )
        lines.append(f"  bottleneck: {value['bottleneck']}; {value['advice']}")
        return "\n".join(lines)

    @property
    def advice(self) -> str:
        if self.bottleneck == "plan":
            return "raise grain_worker_count: this runs on as many cores as there are"
        return super().advice.replace("rows are", "files are")
