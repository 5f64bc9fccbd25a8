"""Helpers of the report's tests: run folders made by hand, and pages read back."""

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from ping_llm.config import Config
from ping_llm.report.page import write_report

BEGIN: dict[str, Any] = {
    "event": "begin",
    "first_step": 0,
    "devices": 2,
    "device": "Abacus",
    "processes": 1,
    "peak_flops": 5e12,
}
PIPELINE: dict[str, Any] = {
    "batches": 50,
    "workers": 2,
    "real_tokens_per_s": 123456,
    "padding_fraction": 0.013,
    "first_batch_s": 1.5,
    "wait_share": 0.31,
    "stages": {"plan": {"ms_per_batch": 1.25, "share": 0.2}, "encode": {"ms_per_batch": 5.0, "share": 0.8}},
    "corrupt_rows": 0,
    "bottleneck": "encode",
    "advice": "raise grain_worker_count",
}
VOID = {"meta", "br", "hr", "input", "link", "path", "rect"}


def records(steps: int, *, rate: float = 0.99) -> list[dict[str, Any]]:
    """Of a run whose loss falls."""
    return [
        {
            "step": step,
            "loss": 1 + 5 * rate**step,
            "grad_norm": 1.0,
            "real_tokens": 2000,
            "learning_rate": 1e-3,
            "real_tokens_per_s": 1000 + step,
            "mfu": 0.4,
            "data_wait_fraction": 0.01,
        }
        for step in range(steps)
    ]


def make_run(
    folder: Path,
    *,
    metrics: list[dict[str, Any]] | None = None,
    sessions: list[dict[str, Any]] | None = None,
    summary: dict[str, Any] | None = None,
    pipeline: dict[str, Any] | None = None,
    evaluation: dict[str, Any] | None = None,
    **keys: Any,
) -> Path:
    """A folder as training leaves it; what is None is missing."""
    folder.mkdir(parents=True)
    (folder / "config.yml").write_text(Config(**{"steps": 50, "dataset_type": "synthetic", **keys}).to_yaml())
    for name, lines in (("metrics.jsonl", metrics), ("sessions.jsonl", sessions)):
        if lines is not None:
            stamped = [{"time": "2026-01-02T03:04:05+00:00", **line} for line in lines]
            (folder / name).write_text("".join(json.dumps(line) + "\n" for line in stamped))
    for name, value in (("summary.json", summary), ("pipeline.json", pipeline), ("evaluation.json", evaluation)):
        if value is not None:
            (folder / name).write_text(json.dumps(value))
    return folder


def finished(folder: Path, steps: int = 50, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "metrics": [*records(steps), {"step": steps, "eval_loss": 3.25, "eval_targets": 10}],
        "sessions": [BEGIN, {"event": "end", "error": None}],
        "summary": {"complete": True, "real_tokens_per_s": 54321, "mfu": 0.412, "data_wait_fraction": 0.02},
    }
    return make_run(folder, **values | changes)


@dataclass
class Page(HTMLParser):
    """What a browser would see: elements with their attributes, and the text outside of style and script."""

    source: str
    elements: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    """Those that run."""
    charts: list[dict[str, Any]] = field(default_factory=list)
    """What charts are drawn from."""
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.source)
        self.close()
        assert not self.open, f"elements that were never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            if self.elements[-1][1].get("type") == "application/json":
                self.charts.append(json.loads(data))
            else:
                self.scripts.append(data)
        elif not self.open or self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def page_of(*runs: Path, **options: Any) -> Page:
    output = runs[0].parent / "page.html"
    write_report(runs, output, **options)
    return Page(output.read_text(encoding="utf-8"))
