"""The sections of a report beside key figures and charts, as values for the templates."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import yaml
from rich.console import Console

from ping_llm.core.errors import PingLlmError, extras_needed
from ping_llm.data.registry import spec_from_config
from ping_llm.evaluate.scores import ORACLE, PROTOCOL_TITLES, SCORE_COLUMNS
from ping_llm.report.charts import evaluation_charts
from ping_llm.report.formatting import UNKNOWN, percent
from ping_llm.report.run import Run, Scores, median_error
from ping_llm.tokens import Role
from ping_llm.tokens.decode import render

# Evaluation: the model compared with the classical predictors, a tab for each protocol.

Cell = tuple[str, bool]  # a value, and whether it is the best of its column


def evaluation_of(run: Run) -> list[dict[str, Any]]:
    """For each protocol: title, verdict, a row of scores for each predictor, charts.

    A row has the median and the 90th percentile of the relative error as positions on a logarithmic axis, in per cent.
    """
    if (found := run.evaluation) is None:
        return []
    sections = []
    kinds = dict.fromkeys([found.model, *found.models], "model") | {ORACLE: "oracle"}
    for name, scores in found.protocols.items():
        ranked = sorted(scores, key=lambda name: (name == ORACLE, median_error(scores[name])))
        both = {name: [scores[name].get(key) or 0.0 for key in ("median_re", "p90_re")] for name in ranked}
        ends = {name: [value for value in pair if 1e-9 < value < 1e9] for name, pair in both.items()}
        errors = [value for pair in ends.values() for value in pair]
        low, high = (min(errors) / 1.1, max(errors) * 1.1) if errors else (0.1, 1.0)
        ticks = [t for power in range(-6, 7) for t in (10.0**power, 3 * 10.0**power) if low <= t <= high]
        at = {value: round(100 * math.log(value / low) / math.log(high / low), 1) for value in errors + ticks}
        count = next((int(s["questions"] or 0) for s in scores.values() if s.get("questions")), None)
        cells = _cells(scores)
        sections.append(
            {
                "tab": _tab(name),
                "title": f"{PROTOCOL_TITLES.get(name, name)}." + (f" {count:,} questions." if count else ""),
                "verdict": found.verdict(name),
                "rows": [
                    {
                        "title": found.title(predictor),
                        "kind": kinds.get(predictor, ""),
                        "cells": cells[predictor],
                        "range": [at[value] for value in ends[predictor]] if len(ends[predictor]) == 2 else None,
                    }
                    for predictor in ranked
                ],
                "ticks": [(percent(tick), at[tick]) for tick in ticks],
                "charts": evaluation_charts(found, name, ranked),
            }
        )
    return sections


def compared_evaluations(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The model of each run, and the best classical predictor of each evaluation."""
    found = [(run.label, run.evaluation) for run in runs if run.evaluation]
    sections = []
    for protocol in dict.fromkeys(protocol for _, one in found for protocol in one.protocols):
        scores: dict[str, Scores] = {}
        for name, one in found:
            if protocol in one.protocols:
                scores[name] = one.protocols[protocol].get(one.model, {})
                if best := one.best_baseline(protocol):
                    scores[f"{one.title(best)} (baseline)"] = one.protocols[protocol][best]
        rows = [{"title": name, "kind": "", "cells": cells} for name, cells in _cells(scores).items()]
        sections.append({"tab": _tab(protocol), "rows": rows, "ticks": []})
    return sections


def _tab(protocol: str) -> str:
    return PROTOCOL_TITLES.get(protocol, protocol).partition(":")[0]


def _cells(scores: Mapping[str, Scores]) -> dict[str, list[Cell]]:
    """A cell for each score of each predictor; the truth is never marked as the best."""
    cells: dict[str, list[Cell]] = {name: [] for name in scores}
    for key, column in SCORE_COLUMNS.items():
        rivals = [value for name, own in scores.items() if name != ORACLE and (value := own.get(key)) is not None]
        best = min(rivals, key=column.distance, default=None)
        for name, own in scores.items():
            value = own.get(key)
            text = UNKNOWN if value is None else column.for_page(value)
            cells[name].append((text, value is not None and value == best and name != ORACLE))
    return cells


# Configuration.

_NOT_COMPARED: Final = ("run_name", "project", "base_output_directory")


def differing_keys(runs: Sequence[Run]) -> tuple[list[str], int]:
    """The keys in which the runs differ, and the number of equal ones."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in _NOT_COMPARED)
    different = [key for key in keys if len({repr(run.settings.get(key)) for run in runs}) > 1]
    return different, len({key for run in runs for key in run.settings}) - len(different)


def fingerprint(run: Run) -> str:
    """A hash of the configuration, without the name and folder of the run."""
    named = {key: value for key, value in run.settings.items() if key not in _NOT_COMPARED}
    return hashlib.sha256(yaml.safe_dump(named, sort_keys=True).encode()).hexdigest()


# Sequences: a few of the training data, made again from the rows.

_MAX_LINES: Final = 12  # measurements of a segment that are shown at first
_MAX_HIDDEN: Final = 60
_CLASSES: Final = {
    **{"cyan": "source", "blue": "destination", "green": "result", "magenta": "time", "dim": "faint"},
    **dict.fromkeys(("bold red", "yellow"), "failed"),
}
"""Colours of the terminal, and the CSS classes that stand for them."""
_FIELDS: Final[Mapping[int, str]] = {
    **{Role.MEASUREMENT_START: "start", Role.RTT_START: "result", Role.FAILED: "failed"},
    **dict.fromkeys((Role.SRC_IPV4, Role.SRC_IPV6), "source"),
    **dict.fromkeys((Role.DST_IPV4, Role.DST_IPV6), "destination"),
    **dict.fromkeys((Role.TIMESTAMP_ABS, Role.TIMESTAMP_DELTA1, Role.TIMESTAMP_DELTA4), "time"),
}
"""The field that a role token begins; bytes belong to the field before them."""


def sequences_of(run: Run) -> list[dict[str, Any]] | str:
    """Three sequences as `BatchSource.explain` has them, with lines of coloured text; or why there are none."""
    if run.dataset_type in ("worlds", "measured"):
        return "A completer is trained on contexts that the device generates: there are no tokens to show."
    if run.dataset_type == "synthetic":
        return "This run was trained on random tokens: there is nothing to decode."
    if run.dataset_type != "network" or not run.config:
        return "This run was trained on text: only sequences of measurements are decoded."
    try:
        return list(_sequences(run))
    except (PingLlmError, OSError, ValueError, TypeError, KeyError) as error:
        return f"The rows cannot be read: {error}"


def _sequences(run: Run) -> Iterator[dict[str, Any]]:
    assert run.config
    with extras_needed("making batches again"):
        from ping_llm.batches.source import BatchSource
    batch = run.data.identity.get("global_batch_size", 0) if run.data else 0
    spec = spec_from_config(run.config, "train", max(1, round(batch / run.config.per_device_batch_size)))
    if run.data and run.data.identity.get("sources") != spec.identity()["sources"]:
        raise PingLlmError(f"the rows of {run.config.network_train_files} have changed since")
    source = BatchSource(spec, run.data.mixture) if run.data else BatchSource(spec)
    last, console = max(0, run.steps_done - 1), Console(emoji=False)
    for step in dict.fromkeys((0, last // 2, last)):
        explained = source.explain(step, 0)
        for segment in explained["segments"]:
            lines = [
                [(part.text, _CLASSES.get(str(part.style), "")) for part in line.render(console)]
                for line in render(segment["token_ids"]).split("\n")
            ]
            segment["shown"], segment["hidden"] = lines[:_MAX_LINES], lines[_MAX_LINES:_MAX_HIDDEN]
            segment["left_out"] = len(lines[_MAX_HIDDEN:])
        yield {**explained, "step": step, "fields": _fields(s["token_ids"] for s in explained["segments"])}


def _fields(segments: Iterable[Sequence[int]]) -> list[tuple[str, int, int]]:
    """The fields of all segments: class, offset and number of tokens. "cut" is the end of a segment."""
    found, offset = [], 0
    for tokens in segments:
        field, names = "start", []
        for token in tokens:
            field = _FIELDS.get(token, field)
            names.append(field)
        for name, group in groupby(names):
            size = len(list(group))
            found.append((name, offset, size))
            offset += size
        found.append(("cut", offset, 0))
    return found
