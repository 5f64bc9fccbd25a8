"""mtr: `--json`, `--report` and `--csv`. The last hop is the destination; what it answered is one report of packets."""

import re
from collections.abc import Iterator
from typing import Final

from ping_llm.sources.formats import Row, Source, documents, listed, mapped, moment, number, summary, text, whole

_START: Final = re.compile(r"Start: (\S+)")
_HOST: Final = re.compile(r"HOST: (\S+)\s+Loss%\s+Snt")
_HOP: Final = re.compile(r"\s*\d+\.(?:\|--)? *(?:AS\S+ +)?(\S+)\s+([\d.]+)%?\s+(\d+)\s+[\d.]+\s+([\d.]+)")
_CSV_HEADER: Final = "Mtr_Version,Start_Time,"


def matches(head: str) -> bool:
    start = head.lstrip()
    if start.startswith(("{", "[")):
        return '"mtr"' in head and '"report"' in head
    return start.startswith(_CSV_HEADER) or _HOST.search(head) is not None


def rows(lines: Iterator[str], source: Source) -> Iterator[Row]:
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip()[:1] in ("{", "["):
        return _json(_again(first, lines), source)
    return _csv(lines, first, source) if first.startswith(_CSV_HEADER) else _report(_again(first, lines), source)


def _again(first: str, lines: Iterator[str]) -> Iterator[str]:
    yield first
    yield from lines


def _json(lines: Iterator[str], source: Source) -> Iterator[Row]:
    for document in documents(lines):
        report = mapped(document.get("report"))
        about, hubs = mapped(report.get("mtr")), listed(report.get("hubs"))
        if (dst := text(about.get("dst"))) and hubs:
            last = hubs[-1]
            src = source.labels.get("src_addr") or text(about.get("src")) or source.vantage
            yield from _reported(None, src, dst, whole(last.get("Snt")), last.get("Loss%"), last.get("Avg"))


def _report(lines: Iterator[str], source: Source) -> Iterator[Row]:
    time_s, src, last = None, "", None
    for line in lines:
        if start := _START.match(line):
            yield from _of_hop(time_s, src, last)
            time_s, src, last = moment(start[1]), "", None
        elif host := _HOST.search(line):
            yield from _of_hop(time_s, src, last)
            src, last = source.labels.get("src_addr") or host[1], None
        elif hop := _HOP.match(line):
            last = hop
    yield from _of_hop(time_s, src, last)


def _of_hop(time_s: float | None, src: str, hop: re.Match[str] | None) -> Iterator[Row]:
    """Of a report whose last hop is "???" nobody can tell where it went."""
    if hop is not None and src and hop[1] != "???":
        yield from _reported(time_s, src, hop[1], whole(hop[3]), hop[2], hop[4])


def _csv(lines: Iterator[str], header: str, source: Source) -> Iterator[Row]:
    """Start_Time, Host (the destination), Hop, Ip, Loss%, Snt and Avg are what is read."""
    column = {name: position for position, name in enumerate(header.strip().split(","))}
    wanted = [column.get(name, -1) for name in ("Start_Time", "Host", "Snt", "Loss%", "Avg")]
    trace, last = ("", ""), None
    for line in lines:
        cells = line.rstrip().split(",")  # mtr writes no quotes
        if len(cells) <= max(wanted) or -1 in wanted or cells[0].startswith("Mtr_Version"):
            continue
        now = (cells[wanted[0]], cells[wanted[1]])
        if last is not None and now != trace:
            yield from _of_cells(trace, last, source)
        trace, last = now, [cells[position] for position in wanted[2:]]
    if last is not None:
        yield from _of_cells(trace, last, source)


def _of_cells(trace: tuple[str, str], cells: list[str], source: Source) -> Iterator[Row]:
    yield from _reported(moment(trace[0]), source.vantage, trace[1], whole(cells[0]), cells[1], cells[2])


def _reported(time_s: float | None, src: str, dst: str, sent: int, loss: object, mean: object) -> Iterator[Row]:
    share = number(loss)
    if share is not None and 0 <= share <= 100:
        received = round(sent * (1 - share / 100))
        yield from summary(time_s, src, dst, sent, received, number(mean))
