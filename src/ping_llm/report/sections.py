"""What the sections of the page say, as values for the templates: evaluation, configuration, origin, sequences."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import yaml
from markupsafe import Markup
from rich.text import Text

from ping_llm.batches.explain import explain_sequence
from ping_llm.batches.report import PipelineReport
from ping_llm.batches.source import BatchSource
from ping_llm.config.keys import TEXT_DATASET_TYPES
from ping_llm.core.errors import PingLlmError
from ping_llm.data.registry import spec_from_config
from ping_llm.data.stream import TextReport
from ping_llm.evaluate.scores import ORACLE, PROTOCOL_TITLES, SCORE_COLUMNS
from ping_llm.report.charts import Chart
from ping_llm.report.curves import evaluation_charts
from ping_llm.report.figures import Figures, kind_of, token_word
from ping_llm.report.formatting import SI, UNKNOWN, duration, number, percent, short
from ping_llm.report.run import Run
from ping_llm.tokens import Role
from ping_llm.tokens.decode import render

# Evaluation: how good the model is beside the classical predictors, a tab for each protocol.

Scores = Mapping[str, float | None]
Cell = tuple[str, bool]
"""A value, and whether it is the best of its column."""


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    title: str
    kind: str
    """model, oracle, or nothing for a baseline."""
    cells: Sequence[Cell]
    error_range: tuple[float, float] | None = None
    """Where the median and the 90th percentile of the relative error lie on the axis of the table, in per cent."""


@dataclass(frozen=True, kw_only=True)
class ProtocolSection:
    tab: str
    title: str = ""
    verdict: str = ""
    rows: Sequence[ScoreRow]
    ticks: Sequence[tuple[str, float]] = ()
    """Labels of the axis of the relative errors, and where they stand, in per cent."""
    charts: Sequence[Chart] = ()


@dataclass(frozen=True, kw_only=True)
class StoredEvaluation:
    """What of an evaluation's file has the form that it should."""

    protocols: Mapping[str, Mapping[str, Scores]]
    titles: Mapping[str, str]
    """How predictors are called."""
    models: Sequence[str]
    """Which of them are models, the run's own first."""

    @classmethod
    def of(cls, found: Mapping[str, Any] | None) -> "StoredEvaluation":
        found = found or {}
        stored, models, protocols = found.get("names"), found.get("models"), found.get("protocols")
        read = {
            str(name): {str(who): _numbers(scores) for who, scores in answers.items() if isinstance(scores, dict)}
            for name, answers in (protocols.items() if isinstance(protocols, dict) else ())
            if isinstance(answers, dict)
        }
        titles = {who: who.replace("_", " ") for answers in read.values() for who in answers}
        titles |= {str(key): str(value) for key, value in (stored.items() if isinstance(stored, dict) else ())}
        known = [str(key) for key in models] if isinstance(models, list) and models else ["model"]
        return cls(protocols=read, titles={"model": "model", **titles, ORACLE: "the truth"}, models=known)

    def best_baseline(self, protocol: str) -> str | None:
        """The classical predictor with the lowest median error."""
        scores = self.protocols[protocol]
        known = [
            w for w, s in scores.items() if w not in self.models and w != ORACLE and s.get("median_re") is not None
        ]
        return min(known, key=lambda who: _error(scores[who]), default=None)


def _numbers(scores: Mapping[str, Any]) -> Scores:
    return {
        str(key): float(value) if isinstance(value, int | float) and math.isfinite(value) else None
        for key, value in scores.items()
    }


def _error(scores: Scores) -> float:
    value = scores.get("median_re")
    return math.inf if value is None else value


def evaluation_of(run: Run) -> list[ProtocolSection]:
    found = StoredEvaluation.of(run.evaluation)
    sections = []
    for name, scores in found.protocols.items():
        count = next((int(s["questions"] or 0) for s in scores.values() if s.get("questions")), None)
        ranked = sorted(scores, key=lambda who: (who == ORACLE, _error(scores[who])))
        kinds = dict.fromkeys(found.models, "model") | {ORACLE: "oracle"}
        errors = [value for s in scores.values() for key in ("median_re", "p90_re") if (value := s.get(key))]
        low, high = (min(errors) / 1.1, max(errors) * 1.1) if errors else (0.1, 1.0)

        def at(value: float, low: float = low, high: float = high) -> float:
            return round(100 * math.log(value / low) / math.log(high / low), 1)

        cells = _cells(scores)
        rows = [
            ScoreRow(
                title=found.titles[who],
                kind=kinds.get(who, ""),
                cells=cells[who],
                error_range=(at(median), at(p90))
                if (median := scores[who].get("median_re")) and (p90 := scores[who].get("p90_re"))
                else None,
            )
            for who in ranked
        ]
        ticks = [t for power in range(-6, 7) for t in (10.0**power, 3 * 10.0**power) if low <= t <= high]
        sections.append(
            ProtocolSection(
                tab=_tab(name),
                title=f"{PROTOCOL_TITLES.get(name, name)}." + (f" {count:,} questions." if count else ""),
                verdict=_verdict(name, found),
                rows=rows,
                ticks=[(percent(tick), at(tick)) for tick in ticks],
                charts=evaluation_charts(ranked, name, run.evaluation or {}, found.models, found.titles),
            )
        )
    return sections


def compared_evaluations(runs: Sequence[Run], names: Sequence[str]) -> list[ProtocolSection]:
    """The model of each run, and the best classical predictor of each evaluation."""
    found = [StoredEvaluation.of(run.evaluation) for run in runs]
    sections = []
    for protocol in dict.fromkeys(protocol for one in found for protocol in one.protocols):
        scores: dict[str, Scores] = {}
        for one, name in zip(found, names, strict=True):
            if protocol in one.protocols:
                scores[name] = one.protocols[protocol].get(one.models[0], {})
                if best := one.best_baseline(protocol):
                    scores[f"{one.titles[best]} (baseline)"] = one.protocols[protocol][best]
        rows = [ScoreRow(title=who, kind="", cells=cells) for who, cells in _cells(scores).items()]
        sections.append(ProtocolSection(tab=_tab(protocol), rows=rows))
    return sections


def _tab(protocol: str) -> str:
    return PROTOCOL_TITLES.get(protocol, protocol).partition(":")[0]


def _cells(scores: Mapping[str, Scores]) -> dict[str, list[Cell]]:
    """A cell for each score of each predictor; the truth competes with nobody."""
    cells: dict[str, list[Cell]] = {who: [] for who in scores}
    for key, column in SCORE_COLUMNS.items():
        rivals = [value for who, s in scores.items() if who != ORACLE and (value := s.get(key)) is not None]
        best = min(rivals, key=column.distance, default=None)
        for who, found in scores.items():
            value = found.get(key)
            text = UNKNOWN if value is None else column.for_page(value)
            cells[who].append((text, value is not None and value == best and who != ORACLE))
    return cells


def _verdict(protocol: str, found: StoredEvaluation) -> str:
    """The model against the best of the classical predictors, by the median relative error."""
    scores, best = found.protocols[protocol], found.best_baseline(protocol)
    own = scores.get(found.models[0], {}).get("median_re")
    if own is None or best is None:
        return ""
    rival = _error(scores[best])
    order = "as good as" if own == rival else "better than" if own < rival else "worse than"
    return (
        f"{found.titles[found.models[0]]}: median error {percent(own)}, {order} the best of the classical predictors "
        f"({found.titles[best]}, {percent(rival)})"
    )


# Several runs side by side.

_FIGURES: Final[tuple[tuple[str, str, Callable[[Any], str], Callable[..., Any] | None], ...]] = (
    ("Lowest evaluation loss, nats", "best_eval_loss", number, min),
    ("Training loss at the end, nats", "loss", number, min),
    ("Real tokens per second", "tokens_per_s", short, max),
    ("MFU", "mfu", percent, max),
    ("Waiting for data", "data_wait", percent, min),
    ("Padding", "padding", percent, min),
    ("Tokens", "tokens", short, None),
    ("Parameters", "parameters", short, None),
    ("FLOP", "flops", partial(short, prefixes=SI), None),
    ("Time", "time", duration, None),
)
"""Title, attribute of `Figures`, how to show it, and which value is best."""


def figure_rows(runs: Sequence[Run], figures: Sequence[Figures]) -> list[tuple[str, list[Cell]]]:
    rows: list[tuple[str, list[Cell]]] = [("Steps", [(f"{run.steps_done:,}", False) for run in runs])]
    for title, key, show, choose in _FIGURES:
        values = [getattr(found, key) for found in figures]
        known = [value for value in values if value is not None]
        best = choose(known) if choose and len(set(known)) > 1 else None
        if known:
            rows.append((title, [(show(value), best is not None and value == best) for value in values]))
    rows.append(("Model", [(kind_of(run), False) for run in runs]))
    rows.append(("Machine", [(run.hardware or UNKNOWN, False) for run in runs]))
    return rows


def pipeline_rows(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The input pipelines as numbers alone."""
    lines: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "bottleneck": lambda report: str(report["bottleneck"]),
        "waiting for data": lambda report: percent(report["wait_share"]),
        "worker processes": lambda report: f"{report['workers']:,}",
        "real tokens per second": lambda report: short(report["real_tokens_per_s"]),
        "padding": lambda report: percent(report["padding_fraction"]),
    }
    for stage in dict.fromkeys(stage for run in runs if run.pipeline for stage in run.pipeline["stages"]):
        lines[f"{stage}, ms per batch"] = partial(_milliseconds, stage)
    return [(title, [show(run.pipeline) if run.pipeline else UNKNOWN for run in runs]) for title, show in lines.items()]


def _milliseconds(stage: str, report: Mapping[str, Any]) -> str:
    return f"{report['stages'][stage]['ms_per_batch']:,.2f}" if stage in report["stages"] else UNKNOWN


# Configuration.

_NOT_COMPARED: Final = ("run_name", "project", "base_output_directory")


def differing_keys(runs: Sequence[Run]) -> tuple[list[str], int]:
    """The keys in which runs differ, and how many are the same."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    different = [
        key for key in keys if key not in _NOT_COMPARED and len({repr(run.settings.get(key)) for run in runs}) > 1
    ]
    return different, len(keys) - len(different)


def stage_meanings(run: Run) -> Mapping[str, str]:
    """What the stages of its input pipeline do."""
    return TextReport.meaning if run.dataset_type in TEXT_DATASET_TYPES else PipelineReport.meaning


# Origin: what a run can be made again from.

Facts = list[tuple[str, Any]]


def origin_of(run: Run, found: Figures) -> dict[str, Facts]:
    s, machine = run.settings, run.machine
    peak = machine.get("peak_flops")
    model: Facts = [
        ("model", kind_of(run)),
        ("parameters", f"{found.parameters:,}" if found.parameters else None),
        ("layers × width", _joined(" × ", s.get("base_num_decoder_layers"), s.get("base_emb_dim"))),
        ("heads × size", _joined(" × ", s.get("base_num_query_heads"), s.get("head_dim"))),
        ("MLP width", s.get("base_mlp_dim")),
        (f"FLOP per {token_word(run)}", short(found.flops_per_token, SI) if found.flops_per_token else None),
        ("FLOP in total", short(found.flops, SI) if found.flops else None),
        ("optimizer", _joined(" ", s.get("opt_type"), s.get("learning_rate_schedule"), s.get("learning_rate"))),
    ]
    on: Facts = [
        ("devices", run.hardware),
        ("processes", machine.get("processes")),
        ("peak of a device", f"{short(peak, SI, ' ')}FLOP/s" if isinstance(peak, int | float) else "unknown"),
        (
            "arithmetic",
            machine.get("arithmetic") or _joined(" ", s.get("dtype"), "on", s.get("weight_dtype"), "weights"),
        ),
        ("ping-llm", machine.get("ping_llm")),
        ("JAX", machine.get("jax")),
        ("Python", machine.get("python")),
    ]
    columns = {"Model": model, "Machine": on if machine else [], "Data and fingerprint": list(_data(run))}
    return {title: [(name, value) for name, value in facts if value] for title, facts in columns.items()}


def _data(run: Run) -> Iterator[tuple[str, Any]]:
    yield "dataset_type", run.dataset_type
    for key in ("network_train_files", "grain_train_files", "hf_train_files", "dataset_path"):
        if run.settings.get(key):
            yield key, Markup("<code>{}</code>").format(run.settings[key])
    named = {key: value for key, value in run.settings.items() if key not in _NOT_COMPARED}
    yield "configuration", _hash(hashlib.sha256(yaml.safe_dump(named, sort_keys=True).encode()).hexdigest())
    for key, value in (run.data.identity if run.data else {}).items():
        if key == "rows" and isinstance(value, list):
            yield "rows", Markup(" ").join(_hash(str(rows)) for rows in value)
        elif key not in ("positions", "dataset_type"):
            is_hash = isinstance(value, str) and len(value) >= 32
            yield key.removeprefix("contexts.").replace("_", " "), _hash(value) if is_hash else str(value)
    if not run.data:
        yield "fingerprint", "not stored yet: it comes with the first checkpoint"


def _hash(value: str) -> Markup:
    return Markup('<code title="{}">{}</code>').format(value, value[:16])


def _joined(between: str, *values: object) -> str | None:
    return between.join(number(v) if isinstance(v, float) else str(v) for v in values) if None not in values else None


# Sequences: a few that the model was trained on, made again from the rows.

_MAX_LINES: Final = 12
"""Measurements of a segment that are shown at once."""
_MAX_HIDDEN: Final = 60
_CLASSES: Final = {
    "cyan": "source",
    "blue": "destination",
    "green": "result",
    "magenta": "time",
    "bold red": "failed",
    "dim": "faint",
    "yellow": "failed",
}
"""Colours of the terminal as classes of the page."""
_FIELDS: Final = {
    Role.MEASUREMENT_START: "start",
    Role.SRC_IPV4: "source",
    Role.SRC_IPV6: "source",
    Role.DST_IPV4: "destination",
    Role.DST_IPV6: "destination",
    Role.TIMESTAMP_ABS: "time",
    Role.TIMESTAMP_DELTA1: "time",
    Role.TIMESTAMP_DELTA4: "time",
    Role.RTT_START: "result",
    Role.FAILED: "failed",
}
"""Which field a token begins; bytes belong to the field before them."""

Spans = list[tuple[str, str]]
"""Texts, each with its class."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    about: Mapping[str, Any]
    """As `explain_sequence` gives it."""
    shown: Sequence[Spans]
    hidden: Sequence[Spans]
    left_out: int


@dataclass(frozen=True, kw_only=True)
class Sequences:
    missing: str = ""
    """Why there are none."""
    panels: Sequence[tuple[str, Mapping[str, Any], Sequence[Segment], Sequence[tuple[str, int, int]]]] = ()
    """Title, facts, segments, and for each stretch of tokens its class, where it begins and how long it is."""


def sequences_of(run: Run, *, wanted: bool = True) -> Sequences:
    """`wanted=False`: without addresses, for a page that others will see."""
    if not wanted:
        return Sequences(missing="Left out of this report: sequences hold addresses.")
    if run.dataset_type in ("worlds", "measured"):
        why = "A completer sees contexts that the device makes from their numbers; there are no tokens to show."
        return Sequences(missing=why)
    if run.dataset_type == "synthetic":
        return Sequences(missing="Random tokens: there is nothing to decode.")
    if run.dataset_type != "network" or not run.config:
        why = "This run was trained on text; only sequences of measurements are decoded here."
        return Sequences(missing=why)
    try:
        return Sequences(panels=list(_panels(run)))
    except (PingLlmError, OSError, ValueError) as error:
        return Sequences(missing=f"The rows cannot be read any more: {error}")


def _panels(run: Run) -> Iterator[Any]:
    assert run.config
    batch = run.data.identity.get("global_batch_size", 0) if run.data else 0
    spec = spec_from_config(run.config, "train", max(1, round(batch / run.config.per_device_batch_size)))
    if run.data and run.data.identity.get("rows") != spec.identity()["rows"]:
        raise PingLlmError(f"{run.config.network_train_files} holds other rows now than it did then")
    source = BatchSource(spec, run.data.mixture) if run.data else BatchSource(spec)
    last = max(0, run.steps_done - 1)
    for step in dict.fromkeys((0, last // 2, last)):
        explained = explain_sequence(source, step, 0)
        segments = [_segment(segment) for segment in explained["segments"]]
        yield f"Step {step:,}", explained, segments, _stretches(s["token_ids"] for s in explained["segments"])


def _segment(about: Mapping[str, Any]) -> Segment:
    lines = [_spans(line) for line in render(about["token_ids"]).split("\n")]
    return Segment(
        about=about,
        shown=lines[:_MAX_LINES],
        hidden=lines[_MAX_LINES:_MAX_HIDDEN],
        left_out=max(0, len(lines) - _MAX_HIDDEN),
    )


def _spans(line: Text) -> Spans:
    spans, at = [], 0
    for span in sorted(line.spans):
        spans += [
            (line.plain[at : span.start], ""),
            (line.plain[span.start : span.end], _CLASSES.get(str(span.style), "")),
        ]
        at = span.end
    return [(text, name) for text, name in [*spans, (line.plain[at:], "")] if text]


def _stretches(segments: Iterator[Sequence[int]]) -> list[tuple[str, int, int]]:
    """The tokens of a sequence by the field they belong to; "cut" is the end of a segment."""
    found: list[tuple[str, int, int]] = []
    at = 0
    for tokens in segments:
        field = "start"
        for token in tokens:
            field = _FIELDS.get(token, field)  # type: ignore[call-overload]
            if found and found[-1][0] == field:
                found[-1] = (field, found[-1][1], found[-1][2] + 1)
            else:
                found.append((field, at, 1))
            at += 1
        found.append(("cut", at, 0))
    return found
