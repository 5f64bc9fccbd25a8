"""fping's text in all its modes: `-c`, `-C` and `-l` (with `-D` times), with `-q` (only reports), `-Q`, and `-e`."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

from ping_llm.sources.formats import Row, Source, number, short, stamped, summary

_HOST: Final = r"(?P<host>\S+)(?: \((?P<addr>[^\s()]+)\))?"
_PACKET: Final = re.compile(_HOST + r"\s+: \[(?P<index>\d+)\], (?:\d+ bytes, )?(?:(?P<rtt>[\d.]+) ms|timed out)")
_EACH: Final = re.compile(_HOST + r"\s+:(?P<rtts>(?: (?:-|\d+(?:\.\d+)?))+)\s*")
_REPORT: Final = re.compile(_HOST + r"\s+: xmt/rcv/%\w+ = (?P<sent>\d{1,9})/(?P<received>\d{1,9})/\d+%(?P<rest>.*)")
_MEAN: Final = re.compile(r"min/avg/max = [\d.]+/([\d.]+)/")
_ALIVE: Final = re.compile(_HOST + r" is (?:alive \((?P<rtt>[\d.]+) ms\)|(?P<lost>unreachable))")
_INTERVAL: Final = re.compile(r"\[\d\d:\d\d:\d\d\]\s*")
_MAX_LOST: Final = 1000
_MAX_LINE: Final = 4000  # of `-C 500 -q`


def matches(head: str) -> bool:
    lines = [stamped(line)[1] for line in short(head.splitlines()[:40], _MAX_LINE)]
    return any(kind.match(line) for line in lines for kind in (_PACKET, _REPORT, _ALIVE)) or any(
        _EACH.fullmatch(line) for line in lines
    )


def rows(lines: Iterator[str], source: Source) -> Iterator[Row]:
    now = None
    seen: Counter[str] = Counter()  # packets that had lines of their own since the last report of their host
    whole: set[str] = set()  # hosts whose first packet was among them: the beginning of the file was not cut off
    intervals = ended = False  # with -Q, reports of intervals; after an empty line, those of all of them together
    for line in short(lines, _MAX_LINE):
        time_s, rest = stamped(line)
        if time_s is not None and not rest:  # a line of its own, as by `date -Is`
            now = time_s
        at = now if time_s is None else time_s
        if not rest.strip():
            ended = intervals
        elif _INTERVAL.fullmatch(rest):
            intervals, ended = True, False
        elif match := _PACKET.match(rest):
            seen[match["host"]] += 1
            whole |= {match["host"]} if match["index"] == "0" else set()
            yield Row(at, *_ends(match, source), number(match["rtt"]))
        elif match := _ALIVE.match(rest):
            yield Row(at, *_ends(match, source), number(match["rtt"]))
        elif match := _REPORT.match(rest):
            (src, dst), sent, mean = _ends(match, source), int(match["sent"]), _MEAN.search(match["rest"])
            if told := seen.pop(match["host"], 0):  # before fping 5, lost packets had no lines
                lost = min(sent - told, _MAX_LOST) if match["host"] in whole else 0
                yield from (Row(at, src, dst, None) for _ in range(lost))
            elif not ended:
                yield from summary(at, src, dst, sent, int(match["received"]), number(mean and mean[1]))
        elif (match := _EACH.fullmatch(rest)) and not seen.pop(match["host"], 0):
            src, dst = _ends(match, source)
            yield from (Row(at, src, dst, number(rtt)) for rtt in match["rtts"].split())


def _ends(match: re.Match[str], source: Source) -> tuple[str, str]:
    host, dst = match["host"], match["addr"] or match["host"]
    return source.vantage_to(host, dst), dst
