"""What ping tools write: ping, fping, mtr and scamper."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Final

from ping_llm.core.errors import PingLlmError
from ping_llm.sources.objects import documents
from ping_llm.sources.tools import Row, Source, count, listed, mapped, moment, number, summary, text

# Lines with times before them.


def short(lines: Iterable[str], limit: int = 300) -> Iterator[str]:
    """The lines that ping tools may have written. In long ones, patterns would take long to find nothing."""
    return (line for line in lines if len(line) <= limit)


# ISO 8601 or epoch seconds; as `date` writes it; or a time of a day that nobody knows.
_ZONE: Final = r"(?:Z| ?(?:UTC|GMT)| ?[+-]\d\d:?\d\d)?"
_STAMP: Final = re.compile(
    rf"\[?(?P<iso>\d{{9,11}}(?:\.\d+)?|\d{{4}}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?{_ZONE})\]?:?\s+"
    rf"|\[?(?P<date>\w{{3}} +\w{{3}} +\d+ \d\d:\d\d:\d\d (?:(?:UTC|GMT) )?\d{{4}})\]?:?\s+"
    r"|\[?(?:(?:\w{3} +)?\w{3} +\d+ )?\d\d:\d\d:\d\d(?:\.\d+)?(?: \w+ \d{4})?(?:\]?:?\s+)(?=\S)"
)


def stamped(line: str) -> tuple[float | None, str]:
    """The time at the beginning of a line (`ping -D`, `fping -D`, `ts`, `date`), and the rest of it."""
    match = _STAMP.match(line)
    if match is None:
        return None, line
    rest = line[match.end() :]
    if match["iso"]:
        said = re.sub(r" ?(?:UTC|GMT)$", "Z", match["iso"].replace(",", "."))
        return moment(re.sub(r" (?=[+-]\d\d:?\d\d$)", "", said)), rest
    if match["date"]:
        try:
            said = re.sub("(?:UTC|GMT) ", "", match["date"])
            return datetime.strptime(said, "%a %b %d %H:%M:%S %Y").replace(tzinfo=UTC).timestamp(), rest
        except ValueError:
            return None, rest
    return None, rest


# ping: Linux (iputils, busybox), BSD and macOS, Windows in any language; with the times of `ping -D`; and hping3.
#
# Lost packets are those that a line says so of, those whose `icmp_seq` is missing, and those that only the statistics
# at the end count. The time of a missing one is between those of its neighbours.

_ADDRESS: Final = r"(?:\d+\.\d+\.\d+\.\d+|[0-9a-fA-F]*:[0-9a-fA-F:]*(?:\d+\.\d+\.\d+\.\d+)?)(?:%\w+)?"
_HEADER: Final = re.compile(r"H?PING (?P<name>[^\s(:]+)")
_IN_BRACKETS: Final = re.compile(rf"\(({_ADDRESS})\)")
_FROM: Final = re.compile(rf"\) from ({_ADDRESS})(?=[: ])")
_HEADER_6: Final = re.compile(rf"PING6\(.*?\) ({_ADDRESS}) --> ({_ADDRESS})")
_FROM_ZERO: Final = re.compile(r"[:+] \d+ data bytes")
_REPLY: Final = re.compile(
    rf"\d+ bytes from (?:\S+ \()?(?P<addr>{_ADDRESS}|\S+?)\)?[:,] (?:icmp_)?seq=(?P<seq>\d+) "
    r".*?time[=<](?P<rtt>[\d.]+) ?ms"
)
_REPLY_HPING: Final = re.compile(rf"len=\d+ ip=(?P<addr>{_ADDRESS}) .*?seq=(?P<seq>\d+) .*?rtt=(?P<rtt>[\d.]+) ms")
_UNANSWERED: Final = re.compile(r"(?:Request timeout for |no answer yet for |From \S+.*?:? )icmp_seq[= ](?P<seq>\d+)")
_TOTAL: Final = re.compile(r"(?P<sent>\d{1,9}) packets transmitted, (?P<received>\d{1,9})")
_MEAN_PING: Final = re.compile(r"(?:rtt|round-trip) \S+ = [\d.]+/([\d.]+)/")

# Windows: the words are in the language of the system, the figures are not. A line that is neither an answer nor the
# beginning of something, before the empty line that ends them, says that none came.
_HEADER_WINDOWS: Final = re.compile(rf"\D*?(?:\[({_ADDRESS})\]|({_ADDRESS}))[^=]*\b\d+ [^=]*:\s*")
_MS_WINDOWS: Final = re.compile(r"[^\d=<](?P<below>[=<])(?P<rtt>\d+) ?(?:ms|мс)(?: TTL=\d+)?\s*$")
_FROM_WINDOWS: Final = re.compile(rf"({_ADDRESS})(?<!:)[^=\d]*:")
_TOTAL_WINDOWS: Final = re.compile(
    r"[^=]*= (?P<sent>\d{1,9})(?!\d| ?m| ?м)[^=]*= (?P<received>\d{1,9})(?!\d| ?m| ?м)[^=]*= \d+"
)

_WRAP: Final = 1 << 16  # values of icmp_seq
_INTERVAL_S: Final = 1.0  # between packets, unless the user says otherwise; used for those before the first answer
_MAX_INFERRED: Final = 1_000_000


def is_ping(head: str) -> bool:
    lines = [stamped(line)[1] for line in short(head.splitlines()[:60])]
    kinds = (_REPLY, _REPLY_HPING, _HEADER_6, _TOTAL, _UNANSWERED)
    if any(kind.match(line) for line in lines for kind in kinds) or any(
        _HEADER.match(line) and "bytes" in line for line in lines
    ):
        return True
    return any(_answer_of_windows(line) or ("32" in line and _HEADER_WINDOWS.fullmatch(line)) for line in lines)


def _answer_of_windows(line: str) -> tuple[str, float] | None:
    """Who answered, and after how many milliseconds."""
    took = _MS_WINDOWS.search(line)
    host = _FROM_WINDOWS.search(line, 0, took.start()) if took else None
    return (host[1], 0.5 if took["below"] == "<" else float(took["rtt"])) if took and host else None


@dataclass(kw_only=True)
class _Run:
    """One run of ping: from its header to its statistics."""

    src: str
    dst: str = ""
    is_whole: bool = False  # with its header: the statistics count no packets that are not in the file
    told: int = 0  # packets of which there was a line, or a row
    last: int | None = None  # the highest icmp_seq, counted on where it wraps around
    last_time: float | None = None
    missing: dict[int, float | None] = field(default_factory=dict)
    """Times of packets without an answer yet: it may come late, after another packet's."""

    def step_to(self, seq: int, time_s: float | None, unanswered: bool = False) -> int:
        """Go on to a packet. Those that were passed over are missing: how many, is returned."""
        if self.last is None:
            self.last = seq - 1
        passed = (seq - self.last + _WRAP // 2) % _WRAP - _WRAP // 2
        number = self.last + passed
        if passed > 0:
            before = self.last_time
            if before is None and time_s is not None:
                before = time_s - passed * _INTERVAL_S
            for ahead in range(1, passed):
                known = None if time_s is None or before is None else before + (time_s - before) * ahead / passed
                self.missing[self.last + ahead] = known
            self.last, self.last_time = number, time_s
        if unanswered:
            self.missing[number] = time_s
        else:
            self.missing.pop(number, None)
        return max(0, passed - 1)

    def lost(self) -> Iterator[Row]:
        """What is missing so far, and will not be waited for any longer."""
        if self.dst:
            self.told += len(self.missing)
            yield from (Row(time_s, self.src, self.dst, None) for time_s in self.missing.values())
        self.missing.clear()


def read_ping(lines: Iterator[str], source: Source) -> Iterator[Row]:
    run, inferred = _Run(src=source.vantage), 0
    windows, answers, quiet = False, False, (0, 0)
    for line in short(lines):
        time_s, rest = stamped(line)
        if match := _REPLY.match(rest) or _REPLY_HPING.match(rest):
            if "DUP!" not in rest:
                run.dst = run.dst or match["addr"]
                inferred += run.step_to(int(match["seq"][:9]), time_s)
                run.told += 1
                yield Row(time_s, run.src, run.dst, number(match["rtt"]))
        elif match := _UNANSWERED.match(rest):
            inferred += run.step_to(int(match["seq"][:9]), time_s, unanswered=True)
        elif (match := _HEADER.match(rest)) or rest.startswith("PING6"):
            yield from run.lost()
            run, windows = _begun(rest, source), False
        elif (match := _TOTAL.search(rest)) or (windows and (match := _TOTAL_WINDOWS.match(rest))):
            yield from run.lost()
            sent, received = int(match["sent"]), int(match["received"])
            if received and not run.told:
                quiet = sent, received  # of -q; the mean is in the next line
            elif run.is_whole and sent > run.told:
                inferred += sent - run.told
                if inferred <= _MAX_INFERRED:
                    yield from (Row(run.last_time, run.src, run.dst, None) for _ in range(sent - run.told))
                run.told = sent
        elif any(quiet) and (match := _MEAN_PING.match(rest)):
            yield from summary(time_s, run.src, run.dst, *quiet, number(match[1]))
            quiet = (0, 0)
        elif answer := _answer_of_windows(rest):
            run.dst, windows, answers = run.dst or answer[0], True, True
            run.told, run.last_time = run.told + 1, time_s
            yield Row(time_s, run.src, run.dst, answer[1])
        elif match := _HEADER_WINDOWS.fullmatch(rest):
            dst = match[1] or match[2]
            if not windows or run.dst != dst or run.told:
                yield from run.lost()
                run = _Run(src=source.vantage_to(dst), dst=dst, is_whole=True)
            windows = answers = True
        elif answers and run.dst and rest.strip() and "=" not in rest and rest.rstrip()[-1:] not in ":：":
            run.told, run.last_time = run.told + 1, time_s
            yield Row(time_s, run.src, run.dst, None)
        elif not rest.strip() and run.told:
            answers = False
        if inferred > _MAX_INFERRED:
            raise PingLlmError(f"over {_MAX_INFERRED:,} packets are missing by their icmp_seq: the file is damaged")
        if len(run.missing) > 10_000:
            yield from run.lost()
    yield from run.lost()


def _begun(header: str, source: Source) -> _Run:
    if match := _HEADER_6.match(header):
        return _Run(src=match[1], dst=match[2], is_whole=True, last=-1)
    name, addresses, own = _HEADER.match(header), _IN_BRACKETS.findall(header), _FROM.search(header)
    targets = [*addresses, *([name["name"]] if name else [])]
    return _Run(
        src=own[1] if own and "src_addr" not in source.labels else source.vantage_to(*targets),
        dst=targets[0] if targets else "",
        is_whole=True,
        last=-1 if _FROM_ZERO.search(header) else 0,
    )


# fping in all its modes: `-c`, `-C` and `-l` (with `-D` times), with `-q` (only reports), `-Q`, and `-e`.

_HOST: Final = r"(?P<host>\S+)(?: \((?P<addr>[^\s()]+)\))?"
_PACKET: Final = re.compile(_HOST + r"\s+: \[(?P<index>\d+)\], (?:\d+ bytes, )?(?:(?P<rtt>[\d.]+) ms|timed out)")
_EACH: Final = re.compile(_HOST + r"\s+:(?P<rtts>(?: (?:-|\d+(?:\.\d+)?))+)\s*")
_REPORT: Final = re.compile(_HOST + r"\s+: xmt/rcv/%\w+ = (?P<sent>\d{1,9})/(?P<received>\d{1,9})/\d+%(?P<rest>.*)")
_MEAN: Final = re.compile(r"min/avg/max = [\d.]+/([\d.]+)/")
_ALIVE: Final = re.compile(_HOST + r" is (?:alive \((?P<rtt>[\d.]+) ms\)|(?P<lost>unreachable))")
_INTERVAL: Final = re.compile(r"\[\d\d:\d\d:\d\d\]\s*")
_MAX_LOST: Final = 1000
_MAX_FPING_LINE: Final = 4000  # of `-C 500 -q`


def is_fping(head: str) -> bool:
    lines = [stamped(line)[1] for line in short(head.splitlines()[:40], _MAX_FPING_LINE)]
    return any(kind.match(line) for line in lines for kind in (_PACKET, _REPORT, _ALIVE)) or any(
        _EACH.fullmatch(line) for line in lines
    )


def read_fping(lines: Iterator[str], source: Source) -> Iterator[Row]:
    now = None
    seen: Counter[str] = Counter()  # packets that had lines of their own since the last report of their host
    whole: set[str] = set()  # hosts whose first packet was among them: the beginning of the file was not cut off
    intervals = ended = False  # with -Q, reports of intervals; after an empty line, those of all of them together
    for line in short(lines, _MAX_FPING_LINE):
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
            yield Row(at, *_ends_of(match, source), number(match["rtt"]))
        elif match := _ALIVE.match(rest):
            yield Row(at, *_ends_of(match, source), number(match["rtt"]))
        elif match := _REPORT.match(rest):
            (src, dst), sent, mean = _ends_of(match, source), int(match["sent"]), _MEAN.search(match["rest"])
            if told := seen.pop(match["host"], 0):  # before fping 5, lost packets had no lines
                lost = min(sent - told, _MAX_LOST) if match["host"] in whole else 0
                yield from (Row(at, src, dst, None) for _ in range(lost))
            elif not ended:
                yield from summary(at, src, dst, sent, int(match["received"]), number(mean and mean[1]))
        elif (match := _EACH.fullmatch(rest)) and not seen.pop(match["host"], 0):
            src, dst = _ends_of(match, source)
            yield from (Row(at, src, dst, number(rtt)) for rtt in match["rtts"].split())


def _ends_of(match: re.Match[str], source: Source) -> tuple[str, str]:
    host, dst = match["host"], match["addr"] or match["host"]
    return source.vantage_to(host, dst), dst


# mtr: `--json`, `--report` and `--csv`. The last hop is the destination; what it answered is one report of packets.

_START: Final = re.compile(r"Start: (\S+)")
_REPORT_HEADER: Final = re.compile(r"HOST: (\S+)\s+Loss%\s+Snt")
_HOP: Final = re.compile(r"\s*\d+\.(?:\|--)? *(?:AS\S+ +)?(\S+)\s+([\d.]+)%?\s+(\d+)\s+[\d.]+\s+([\d.]+)")
_CSV_HEADER: Final = "Mtr_Version,Start_Time,"


def is_mtr(head: str) -> bool:
    start = head.lstrip()
    if start.startswith(("{", "[")):
        return '"mtr"' in head and '"report"' in head
    return start.startswith(_CSV_HEADER) or _REPORT_HEADER.search(head) is not None


def read_mtr(lines: Iterator[str], source: Source) -> Iterator[Row]:
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip()[:1] in ("{", "["):
        return _of_json(chain([first], lines), source)
    return _of_csv(lines, first, source) if first.startswith(_CSV_HEADER) else _of_report(chain([first], lines), source)


def _of_json(lines: Iterator[str], source: Source) -> Iterator[Row]:
    for document in documents(lines):
        report = mapped(document.get("report"))
        about, hubs = mapped(report.get("mtr")), listed(report.get("hubs"))
        if (dst := text(about.get("dst"))) and hubs:
            last = hubs[-1]
            src = source.labels.get("src_addr") or text(about.get("src")) or source.vantage
            yield from _of_summary(None, src, dst, count(last.get("Snt")), last.get("Loss%"), last.get("Avg"))


def _of_report(lines: Iterator[str], source: Source) -> Iterator[Row]:
    time_s, src, last = None, "", None
    for line in lines:
        if start := _START.match(line):
            yield from _of_hop(time_s, src, last)
            time_s, src, last = moment(start[1]), "", None
        elif host := _REPORT_HEADER.search(line):
            yield from _of_hop(time_s, src, last)
            src, last = source.labels.get("src_addr") or host[1], None
        elif hop := _HOP.match(line):
            last = hop
    yield from _of_hop(time_s, src, last)


def _of_hop(time_s: float | None, src: str, hop: re.Match[str] | None) -> Iterator[Row]:
    """Of a report whose last hop is "???" nobody can tell where it went."""
    if hop is not None and src and hop[1] != "???":
        yield from _of_summary(time_s, src, hop[1], count(hop[3]), hop[2], hop[4])


def _of_csv(lines: Iterator[str], header: str, source: Source) -> Iterator[Row]:
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
    yield from _of_summary(moment(trace[0]), source.vantage, trace[1], count(cells[0]), cells[1], cells[2])


def _of_summary(time_s: float | None, src: str, dst: str, sent: int, loss: object, mean: object) -> Iterator[Row]:
    share = number(loss)
    if share is not None and 0 <= share <= 100:
        received = round(sent * (1 - share / 100))
        yield from summary(time_s, src, dst, sent, received, number(mean))


# scamper's pings as JSON lines: `scamper -O json`, or `sc_warts2json` of its own files.


def is_scamper(head: str) -> bool:
    compact = head.replace(" ", "").lstrip()
    return compact.startswith("{") and ('"ping_sent":' in compact or '"type":"cycle-start"' in compact)


def read_scamper(lines: Iterator[str], source: Source) -> Iterator[Row]:
    for ping in documents(lines):
        dst = text(ping.get("dst"))
        if ping.get("type") == "ping" and dst:
            yield from _scamper_packets(ping, text(ping.get("src")) or source.vantage, dst)


def _scamper_packets(ping: dict[str, Any], src: str, dst: str) -> Iterator[Row]:
    start, answered = _scamper_time(ping.get("start")), set[int]()
    for answer in listed(ping.get("responses")):
        rtt, seq = number(answer.get("rtt")), count(answer.get("seq"))
        # Routers on the way may answer, too, with an error; and a packet may be answered twice.
        if rtt is not None and text(answer.get("from")) == dst and seq not in answered:
            answered.add(seq)
            sent = _scamper_time(answer.get("tx"))
            yield Row(start if sent is None else sent, src, dst, rtt)
    lost = min(count(ping.get("ping_sent")) - len(answered), _MAX_LOST)
    yield from (Row(start, src, dst, None) for _ in range(lost))


def _scamper_time(time: Any) -> float | None:
    seconds = number(mapped(time).get("sec"))
    return None if seconds is None else seconds + (number(mapped(time).get("usec")) or 0) / 1e6
