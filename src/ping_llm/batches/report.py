"""What the pipeline did: time per stage, how long training waited for data, what limits it, and what to change."""

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

from ping_llm.batches.spec import LoaderSettings
from ping_llm.core.files import write_atomically

LAY_OUT: Final = "lay out"  # the stage that runs in the training process, not in the workers
SHOW_EVERY_S: Final = 60.0
_NEGLIGIBLE_WAIT: Final = 0.01
_WAITS_FROM: Final = 0.6  # a larger share of the time in `read` means waiting for a disk: from memory it is under half

_ADVICE: Final = {
    "consumer": "nothing: batches are ready before they are asked for",
    "unknown": "run a few more steps",
    "plan": "batches need many small rows (or documents) each; raise per_device_batch_size or merge row sets",
    "read": "files are not in memory; put them on a faster or local disk, or give the machine more memory for them",
    LAY_OUT: "nothing to do: batches come as fast as the training process can write them to memory",
}
_ADVICE_FOR_COMPUTATION: Final = "raise grain_worker_count: this runs on as many cores as there are"

_log = logging.getLogger(__name__)


@dataclass
class Times:
    """How often something was done, and how many seconds it took."""

    count: int = 0
    total: float = 0.0
    least: float = math.inf
    most: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.least, self.most = min(self.least, seconds), max(self.most, seconds)

    def to_json(self) -> dict[str, Any]:
        least, mean, most = (self.least, self.total / self.count, self.most) if self.count else (0.0, 0.0, 0.0)
        seconds = {"min_ms": least, "mean_ms": mean, "max_ms": most}
        return {"count": self.count} | {name: round(1e3 * value, 3) for name, value in seconds.items()}


class PipelineReport:
    """Adds up what every batch cost. Shows it every minute and at the end, if the settings ask for that.

    `stages` says what each stage does and, behind an arrow, what it gives; they run in all workers at once. `settings`
    are resolved (no -1), and `shape` is that of a host's batches.
    """

    def __init__(self, stages: Mapping[str, str], settings: LoaderSettings, shape: tuple[int, int]) -> None:
        self.workers, self._settings = settings.worker_count, settings
        self._positions = math.prod(shape)
        self._meaning = {**stages, LAY_OUT: f"tokens to arrays, in the training process → 6 × int32 {list(shape)}"}
        self._shown = time.monotonic()
        self.reset()

    def reset(self) -> None:
        self._stages = {name: Times() for name in self._meaning}
        self._waiting = Times()
        self._first_wait_s = 0.0
        self._tokens = self._padding = self._batches = self._corrupt_rows = self._batches_shown = 0
        self._since = self._until = time.perf_counter()

    def add(self, stage_s: Mapping[str, float], *, wait_s: float, tokens: int, corrupt_rows: int = 0) -> None:
        if self._batches == 0:  # starting the workers is not what a running pipeline costs
            self._first_wait_s = wait_s
            self._since = time.perf_counter()
        else:
            self._waiting.add(wait_s)
            self._tokens += tokens
            for name, seconds in stage_s.items():
                self._stages[name].add(seconds)
        self._padding += self._positions - tokens
        self._corrupt_rows = max(self._corrupt_rows, corrupt_rows)
        self._batches += 1
        self._until = time.perf_counter()
        if time.monotonic() - self._shown > SHOW_EVERY_S:
            self.show()

    def show(self) -> None:
        """Write to the log and to files, if there is something new and the settings ask for it."""
        self._shown = time.monotonic()
        if self._batches == self._batches_shown:
            return
        self._batches_shown = self._batches
        if self._corrupt_rows:
            _log.warning("%s rows could not be read and were left out", f"{self._corrupt_rows:,}")
        if self._settings.debug:
            _log.info("%s", self.table())
        if self._settings.visualization_dir:
            self.write(Path(self._settings.visualization_dir))

    @property
    def wait_share(self) -> float:
        elapsed = self._until - self._since
        return self._waiting.total / elapsed if self._batches > 1 and elapsed > 0 else 0.0

    @property
    def bottleneck(self) -> str:
        """What limits the rate: the slowest stage, or the consumer if it never waits for data."""
        if self._batches <= 1:
            return "unknown"
        if self.workers and self.wait_share < _NEGLIGIBLE_WAIT:
            return "consumer"
        side_by_side = max(1, self.workers)
        seconds = {name: times.total for name, times in self._stages.items()}
        return max(seconds, key=lambda name: seconds[name] / (1 if name == LAY_OUT else side_by_side))

    @property
    def advice(self) -> str:
        name = self.bottleneck
        if name == "read" and self._stages[name].total < _WAITS_FROM * self._all_stages_s:
            return _ADVICE_FOR_COMPUTATION
        return _ADVICE.get(name, _ADVICE_FOR_COMPUTATION)

    @property
    def _all_stages_s(self) -> float:
        return max(1e-12, sum(times.total for times in self._stages.values()))

    def to_json(self) -> dict[str, Any]:
        batches = max(1, self._batches - 1)
        elapsed = self._until - self._since
        all_tokens = self._tokens * self._batches // batches  # the first batch's tokens are not in `_tokens`
        return {
            "batches": self._batches,
            "workers": self.workers,
            "real_tokens_per_s": round(self._tokens / elapsed) if elapsed > 0 else 0,
            "padding_fraction": round(self._padding / max(1, self._padding + all_tokens), 5),
            "first_batch_s": round(self._first_wait_s, 3),
            "wait_share": round(self.wait_share, 4),
            "waiting": self._waiting.to_json(),
            "stages": {
                name: {
                    "ms_per_batch": round(1e3 * times.total / batches, 3),
                    "share": round(times.total / self._all_stages_s, 3),
                    **times.to_json(),
                    "gives": self._meaning[name].partition(" → ")[2],
                }
                for name, times in self._stages.items()
            },
            "processes": self._processes(),
            "corrupt_rows": self._corrupt_rows,
            "bottleneck": self.bottleneck,
            "advice": self.advice,
        }

    def _processes(self) -> dict[str, list[str]]:
        """The stages of each kind of process, by a name that says how many processes and buffers there are."""
        in_workers = [name for name in self._stages if name != LAY_OUT]
        if not self.workers:
            return {"training process": [*in_workers, LAY_OUT]}
        words = f"{self.workers} worker process(es), each with up to {self._settings.buffer_size} batches ready"
        return {words: in_workers, "training process": [LAY_OUT]}

    def table(self) -> str:
        """For the log: one line per stage, then the verdict."""
        value = self.to_json()
        rows = value["stages"] | {"waiting": value["waiting"] | {"share": value["wait_share"]}}
        lines = [
            f"pipeline: {value['batches']} batches, {value['real_tokens_per_s']:,} tokens/s, {self.workers} worker(s)",
            f"  {'stage':8} {'count':>7} {'min ms':>9} {'mean ms':>9} {'max ms':>9} {'share':>6}",
            *(
                f"  {name:8} {row['count']:7,} {row['min_ms']:9.2f} {row['mean_ms']:9.2f} {row['max_ms']:9.2f} "
                f"{row['share']:6.0%}  {self._meaning.get(name, 'for a batch; share of all time')}"
                for name, row in rows.items()
            ),
            f"  waiting for data: {value['wait_share']:.1%} of the time; padding {value['padding_fraction']:.2%}",
            f"  bottleneck: {value['bottleneck']}; {value['advice']}",
        ]
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """Write the pipeline as a picture (`pipeline_graph.svg`) and as numbers (`pipeline.json`)."""
        value = self.to_json()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "pipeline_graph.svg", draw(value))
        write_atomically(folder / "pipeline.json", json.dumps(value, indent=1))


_PICTURE: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 190" font-family="sans-serif" font-size="13">\
<text x="20" y="24">{title}</text>{processes}{boxes}<text x="20" y="174">{verdict}</text></svg>
"""
_BOX: Final = """\
<rect x="{x}" y="48" width="120" height="56" rx="8" fill="rgb({shade},{shade},250)" stroke="#335" \
stroke-width="{line}"/><path d="{arrow}" stroke="#335" fill="#335"/>\
<text x="{x}" dx="60" y="72" text-anchor="middle">{name}</text>\
<text x="{x}" dx="60" y="92" text-anchor="middle">{note}</text>\
<text x="{x}" dx="60" y="120" text-anchor="middle" font-size="10">{gives}</text>"""
_PROCESS: Final = """\
<rect x="{x}" y="38" width="{width}" height="90" rx="8" fill="none" stroke="#99a" stroke-dasharray="4 3"/>\
<text x="{x}" y="142" font-size="10">{name}</text>"""


def draw(report: Mapping[str, Any]) -> str:
    """SVG of a pipeline report: a box for each stage with what it gives, darker the more time it takes, the bottleneck
    outlined; around the boxes, the processes with their buffers. The report may be an old or a stranger's file."""
    stages = report["stages"]
    notes = {name: f"{stage['ms_per_batch']:.2f} ms, {stage['share']:.0%}" for name, stage in stages.items()}
    notes = {"files": "", **notes, "training": f"waits {report['wait_share']:.1%}"}
    at = {name: 20 + 150 * i for i, name in enumerate(notes)}
    boxes = [
        _BOX.format(
            x=at[name],
            shade=int(245 - 130 * stages.get(name, {}).get("share", 0.0)),
            arrow=f"M{at[name]} 76 l-8 -4 v8 z h-22" if i else "",
            line=3 if name == report["bottleneck"] else 1,
            name=escape(name),
            note=note,
            gives=escape(str(stages.get(name, {}).get("gives", ""))),
        )
        for i, (name, note) in enumerate(notes.items())
    ]
    found = report.get("processes")  # which reports of earlier versions do not have
    processes = [
        _PROCESS.format(x=at[names[0]] - 8, width=at[names[-1]] - at[names[0]] + 136, name=escape(process))
        for process, names in (found.items() if isinstance(found, dict) else ())
        if names and isinstance(names, list) and all(name in [*at] for name in names)
    ]
    where = f"{report['workers']} worker process(es)" if report["workers"] else "in the training process"
    title = f"{report['real_tokens_per_s']:,} tokens/s, {where}, padding {report['padding_fraction']:.2%}"
    verdict = escape(f"bottleneck: {report['bottleneck']}; {report['advice']}")
    parts = {"title": title, "processes": "".join(processes), "boxes": "".join(boxes), "verdict": verdict}
    return _PICTURE.format(width=20 + 150 * len(notes), **parts)
