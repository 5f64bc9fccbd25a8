"""What the pipeline did: time per stage, how long training waited for data, what limits it, and what to change."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

from ping_llm.core.files import write_atomically

LAY_OUT: Final = "lay out"
"""What is done in the training process, and not in the workers."""

_NEGLIGIBLE_WAIT: Final = 0.01
_WAITS_FROM: Final = 0.6
"""From this share of the time on reading is waiting for a disk: from memory it takes less than half."""

_ADVICE: Final = {
    "consumer": "nothing: batches are ready before they are asked for",
    "unknown": "run a few more steps",
    "plan": "batches need many small rows (or documents) each; raise per_device_batch_size or merge row sets",
    "read": "files are not in memory; put them on a faster or local disk, or give the machine more memory for them",
    LAY_OUT: "nothing to do: batches come as fast as the training process can write them to memory",
}
_ADVICE_FOR_COMPUTATION: Final = "raise grain_worker_count: this runs on as many cores as there are"


class PipelineReport:
    """Adds up what every batch cost. Stages run in the workers side by side; waiting is the training process's."""

    def __init__(self, stages: Mapping[str, str], workers: int) -> None:
        self.workers = workers
        self._meaning = {**stages, LAY_OUT: "tokens to arrays, in the training process"}
        self.reset()

    def reset(self) -> None:
        self._stage_s = dict.fromkeys(self._meaning, 0.0)
        self._wait_s = self._first_wait_s = 0.0
        self._tokens = self._padding = self._batches = self._corrupt_rows = 0
        self._since = self._until = time.perf_counter()

    def add(
        self, stage_s: Mapping[str, float], *, wait_s: float, tokens: int, padding: int, corrupt_rows: int = 0
    ) -> None:
        if self._batches == 0:  # starting the workers is not what a running pipeline costs
            self._first_wait_s = wait_s
            self._since = time.perf_counter()
        else:
            self._wait_s += wait_s
            self._tokens += tokens
            for name, seconds in stage_s.items():
                self._stage_s[name] += seconds
        self._padding += padding
        self._corrupt_rows = max(self._corrupt_rows, corrupt_rows)
        self._batches += 1
        self._until = time.perf_counter()

    @property
    def wait_share(self) -> float:
        elapsed = self._until - self._since
        return self._wait_s / elapsed if self._batches > 1 and elapsed > 0 else 0.0

    @property
    def bottleneck(self) -> str:
        """What limits the rate: the stage that takes longest, unless the data is never waited for."""
        if self._batches <= 1:
            return "unknown"
        if self.workers and self.wait_share < _NEGLIGIBLE_WAIT:
            return "consumer"
        side_by_side = max(1, self.workers)
        return max(self._stage_s, key=lambda name: self._stage_s[name] / (1 if name == LAY_OUT else side_by_side))

    @property
    def advice(self) -> str:
        name = self.bottleneck
        if name == "read" and self._stage_s[name] < _WAITS_FROM * sum(self._stage_s.values()):
            return _ADVICE_FOR_COMPUTATION
        return _ADVICE.get(name, _ADVICE_FOR_COMPUTATION)

    def to_json(self) -> dict[str, Any]:
        batches = max(1, self._batches - 1)
        elapsed = self._until - self._since
        all_stages = max(1e-12, sum(self._stage_s.values()))
        all_tokens = self._tokens * self._batches // batches  # those of the first batch are not counted
        return {
            "batches": self._batches,
            "workers": self.workers,
            "real_tokens_per_s": round(self._tokens / elapsed) if elapsed > 0 else 0,
            "padding_fraction": round(self._padding / max(1, self._padding + all_tokens), 5),
            "first_batch_s": round(self._first_wait_s, 3),
            "wait_share": round(self.wait_share, 4),
            "stages": {
                name: {"ms_per_batch": round(1e3 * s / batches, 3), "share": round(s / all_stages, 3)}
                for name, s in self._stage_s.items()
                if s or name != LAY_OUT  # where it is not measured by itself, it is part of another stage
            },
            "corrupt_rows": self._corrupt_rows,
            "bottleneck": self.bottleneck,
            "advice": self.advice,
        }

    def table(self) -> str:
        """For the log: one line per stage, then the verdict."""
        value = self.to_json()
        lines = [
            f"pipeline: {value['batches']} batches, {value['real_tokens_per_s']:,} tokens/s, {self.workers} worker(s)",
            f"  {'stage':8} {'ms/batch':>9} {'share':>6}",
            *(
                f"  {name:8} {stage['ms_per_batch']:9.2f} {stage['share']:6.0%}  {self._meaning[name]}"
                for name, stage in value["stages"].items()
            ),
            f"  waiting for data: {value['wait_share']:.1%} of the time; padding {value['padding_fraction']:.2%}",
            f"  bottleneck: {value['bottleneck']}; {value['advice']}",
        ]
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """The pipeline as a picture (`pipeline_graph.svg`) and as numbers (`pipeline.json`)."""
        value = self.to_json()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "pipeline_graph.svg", draw(value))
        write_atomically(folder / "pipeline.json", json.dumps(value, indent=1))


_PICTURE: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 140" font-family="sans-serif" font-size="13">\
<text x="20" y="24">{title}</text>{boxes}<text x="20" y="124">{verdict}</text></svg>
"""
_BOX: Final = """\
<rect x="{x}" y="40" width="120" height="56" rx="8" fill="rgb({shade},{shade},250)" stroke="#335" \
stroke-width="{line}"/><path d="{arrow}" stroke="#335" fill="#335"/>\
<text x="{x}" dx="60" y="64" text-anchor="middle">{name}</text>\
<text x="{x}" dx="60" y="84" text-anchor="middle">{note}</text>"""


def draw(report: Mapping[str, Any]) -> str:
    """SVG of a pipeline report: a box for each stage, darker where more of the time goes, the bottleneck outlined."""
    stages = report["stages"]
    notes = {name: f"{stage['ms_per_batch']:.2f} ms, {stage['share']:.0%}" for name, stage in stages.items()}
    notes = {"rows": "", **notes, "training": f"waits {report['wait_share']:.1%}"}
    boxes = [
        _BOX.format(
            x=20 + 150 * i,
            shade=int(245 - 130 * stages.get(name, {}).get("share", 0.0)),
            arrow=f"M{20 + 150 * i} 68 l-8 -4 v8 z h-22" if i else "",
            line=3 if name == report["bottleneck"] else 1,
            name=escape(name),
            note=note,
        )
        for i, (name, note) in enumerate(notes.items())
    ]
    where = f"{report['workers']} worker process(es)" if report["workers"] else "in the training process"
    title = f"{report['real_tokens_per_s']:,} tokens/s, {where}, padding {report['padding_fraction']:.2%}"
    verdict = escape(f"bottleneck: {report['bottleneck']}; {report['advice']}")
    return _PICTURE.format(width=20 + 150 * len(notes), title=title, boxes="".join(boxes), verdict=verdict)
