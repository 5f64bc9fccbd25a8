"""A few training sequences, made again from the rows, in colour, with where each part comes from."""

from collections.abc import Iterator
from typing import Any, Final

from rich.text import Text

from ping_llm.batches import explain
from ping_llm.batches.source import BatchSource
from ping_llm.core.errors import PingLlmError
from ping_llm.data.registry import spec_from_config
from ping_llm.report.markup import Content, Markup, details, element, join, tabbed
from ping_llm.report.run import Run
from ping_llm.report.sections import missing, section
from ping_llm.tokens import Role
from ping_llm.tokens.decode import render

_MOST_LINES: Final = 12
"""Measurements of a segment that are shown at once."""
_MOST_HIDDEN: Final = 60
_CLASSES: Final = {
    "cyan": "source",
    "blue": "destination",
    "green": "result",
    "magenta": "time",
    "bold red": "failed",
    "dim": "faint",
    "yellow": "failed",
}
_KEY: Final = (("source", "source"), ("destination", "destination"), ("result", "result"), ("time", "time"))


def sequences(run: Run, *, wanted: bool = True) -> Markup:
    """`wanted=False`: without addresses, for a page that others will see."""
    title = "What it was trained on"
    if not wanted:
        return section("sequences", title, missing("Left out of this report: sequences hold addresses."))
    if run.dataset_type != "network" or not run.config:
        return section("sequences", title, missing(_why_none(run)))
    try:
        panels = list(_panels(run))
    except (PingLlmError, OSError, ValueError) as error:
        return section("sequences", title, missing(f"The rows cannot be read any more: {error}"))
    lead: Content = [
        "A batch is a function of rows, seed and step, so these were made again, token by token. Any other: ",
        element("code", f"ping-llm inspect batch --config {run.folder}/config.yml --step N"),
    ]
    key = element("ul", [element("li", element("span", class_=f"key {c}"), name) for c, name in _KEY], class_="legend")
    return section("sequences", title, key, tabbed("Sequence", panels), lead=lead)


def _why_none(run: Run) -> str:
    if run.dataset_type in ("worlds", "measured"):
        return "A completer sees contexts that the device makes from their numbers; there are no tokens to show."
    if run.dataset_type == "synthetic":
        return "Random tokens: there is nothing to decode."
    return "This run was trained on text; only sequences of measurements are decoded here."


def _panels(run: Run) -> Iterator[tuple[str, Markup]]:
    assert run.config
    devices = 1
    if run.data:
        batch = run.data.identity.get("global_batch_size", 0)
        devices = max(1, round(batch / run.config.per_device_batch_size))
    spec = spec_from_config(run.config, "train", devices)
    if run.data:
        if run.data.identity.get("rows") != spec.identity()["rows"]:
            raise PingLlmError(f"{run.config.network_train_files} holds other rows now than it did then")
        source = BatchSource(spec, run.data.mixture)
    else:
        source = BatchSource(spec)
    last = max(0, run.steps_done - 1)
    for step in dict.fromkeys((0, last // 2, last)):
        yield f"Step {step:,}", _sequence(explain.explain_sequence(source, step, 0))


def _sequence(explained: dict[str, Any]) -> Markup:
    if not explained["segments"]:
        return missing("Beyond the end of the data: padding.")
    tokens, padding = explained["tokens"], explained["padding"]
    count = len(explained["segments"])
    facts = (
        f"Sequence 0 of its batch: {count} segment{'s' if count != 1 else ''}, {tokens:,} tokens, {padding:,} of "
        f"padding; epoch {explained['epoch']}, {explained['split']} split of {explained['rows']}."
    )
    return element(
        "div",
        element("p", facts, class_="note"),
        _strip([segment["token_ids"] for segment in explained["segments"]], padding),
        [_segment(number, segment) for number, segment in enumerate(explained["segments"], 1)],
    )


def _segment(number: int, segment: dict[str, Any]) -> Markup:
    begin, end = segment["window"]
    row = (
        "its whole row"
        if segment["whole_row"]
        else f"measurements {begin:,}–{end:,} of {segment['row_measurements']:,}"
    )
    used = len(segment["measurement_indices"])
    heading = [
        element("span", f"Segment {number}: ", element("span", segment["source"], class_="mono")),
        element(
            "span",
            f"{used} measurement{'s' if used != 1 else ''} from {row}; times: {segment['mode']}; "
            f"{segment['shard']} record {segment['position']:,}",
            class_="note",
        ),
    ]
    lines = [_line(line) for line in render(segment["token_ids"]).split("\n")]
    more = lines[_MOST_LINES:_MOST_HIDDEN]
    left = len(lines) - _MOST_LINES - len(more)
    return details(
        heading,
        element("ol", lines[:_MOST_LINES], class_="tokens"),
        details(f"{len(more):,} more", element("ol", more, class_="tokens")) if more else None,
        element("p", f"… and {left:,} more", class_="note") if left > 0 else None,
        open_=number == 1,
        class_="segment",
    )


def _line(line: Text) -> Markup:
    """Text in colours of the terminal as HTML in those of the page."""
    parts: list[Markup | str] = []
    at = 0
    for span in sorted(line.spans):
        parts.append(line.plain[at : span.start])
        parts.append(element("span", line.plain[span.start : span.end], class_=_CLASSES.get(str(span.style), "")))
        at = span.end
    parts.append(line.plain[at:])
    return element("li", join(parts))


def _strip(segments: list[list[int]], padding: int) -> Markup:
    """Every token of the sequence as a sliver in the colour of its field; gaps between segments."""
    slivers: list[tuple[str, int]] = []
    for tokens in segments:
        field = "start"
        for token in tokens:
            field = _FIELDS.get(token, field)
            if slivers and slivers[-1][0] == field:
                slivers[-1] = (field, slivers[-1][1] + 1)
            else:
                slivers.append((field, 1))
        slivers.append(("cut", 0))
    total = sum(len(tokens) for tokens in segments) + padding
    drawn, at = [], 0
    for field, size in slivers:
        if field == "cut":
            drawn.append(element("path", d=f"M{at} 0V10", class_="cut"))
        else:
            drawn.append(element("rect", x=at, y=1.5, width=size, height=7, class_=field))
        at += size
    label = (
        f"{total} places: {', '.join(str(len(tokens)) for tokens in segments)} tokens in segments, {padding} padding"
    )
    return element(
        "svg", drawn, viewBox=f"0 0 {max(total, 1)} 10", preserveAspectRatio="none", class_="strip-of-tokens",
        role="img", aria_label=label,
    )  # fmt: skip


_FIELDS: Final = {
    int(Role.MEASUREMENT_START): "start",
    int(Role.SRC_IPV4): "source",
    int(Role.SRC_IPV6): "source",
    int(Role.DST_IPV4): "destination",
    int(Role.DST_IPV6): "destination",
    int(Role.TIMESTAMP_ABS): "time",
    int(Role.TIMESTAMP_DELTA1): "time",
    int(Role.TIMESTAMP_DELTA4): "time",
    int(Role.RTT_START): "result",
    int(Role.FAILED): "failed",
}
