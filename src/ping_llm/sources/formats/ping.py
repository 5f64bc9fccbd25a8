"""`ping` as text: Linux (iputils, busybox), BSD and macOS, Windows in several languages; with the times of `ping -D`.

Lost packets are those that a line says so of, those whose `icmp_seq` is missing, and those that only the statistics at
the end count. The time of a missing one is between those of its neighbours.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from ping_llm.core.errors import PingLlmError
from ping_llm.sources.formats import Row, Source, number, short, stamped, summary

_ADDRESS: Final = r"(?:\d+\.\d+\.\d+\.\d+|[0-9a-fA-F]*:[0-9a-fA-F:]*(?:\d+\.\d+\.\d+\.\d+)?)(?:%\w+)?"
_HEADER: Final = re.compile(r"PING (?P<name>[^\s(:]+)")
_IN_BRACKETS: Final = re.compile(rf"\(({_ADDRESS})\)")
_FROM: Final = re.compile(rf"\) from ({_ADDRESS})(?=[: ])")
_HEADER_6: Final = re.compile(rf"PING6\(.*?\) ({_ADDRESS}) --> ({_ADDRESS})")
_FROM_ZERO: Final = re.compile(r": \d+ data bytes")
_REPLY: Final = re.compile(
    rf"\d+ bytes from (?:\S+ \()?(?P<addr>{_ADDRESS}|\S+?)\)?[:,] (?:icmp_)?seq=(?P<seq>\d+) "
    r".*?time[=<](?P<rtt>[\d.]+) ?ms"
)
_UNANSWERED: Final = re.compile(r"(?:Request timeout for |no answer yet for |From \S+.*?:? )icmp_seq[= ](?P<seq>\d+)")
_TOTAL: Final = re.compile(r"(?P<sent>\d{1,9}) packets transmitted, (?P<received>\d{1,9})")
_MEAN: Final = re.compile(r"(?:rtt|round-trip) \S+ = [\d.]+/([\d.]+)/")

# Windows: the words are in the language of the system, the figures are not.
_HEADER_WINDOWS: Final = re.compile(rf"\D*?(?:\[({_ADDRESS})\]|({_ADDRESS}))[^=]*\b\d+ [^=]*:\s*")
_REPLY_WINDOWS: Final = re.compile(rf"\S.*?({_ADDRESS}): (?:.*[^\d=<])?(?P<below>[=<])(?P<rtt>\d+) ?ms(?: TTL=\d+)?\s*")
_TIMEOUT_WINDOWS: Final = re.compile(
    r"Request timed out|General failure|Zeit.{1,2}berschreitung der Anf|D.{1,2}lai d.attente de la demande"
    rf"|Tiempo de espera agotado|Richiesta scaduta|Esgotado o tempo limite|\S.* ?{_ADDRESS}: [^=]*\.\s*$"
)
_TOTAL_WINDOWS: Final = re.compile(r"[^=]*= (?P<sent>\d{1,9}),[^=]*= (?P<received>\d{1,9}),[^=]*= \d+")

_WRAP: Final = 1 << 16  # values of icmp_seq
_INTERVAL_S: Final = 1.0  # between packets, unless the user says otherwise; used for those before the first answer
_MAX_INFERRED: Final = 1_000_000


def matches(head: str) -> bool:
    lines = [stamped(line)[1] for line in short(head.splitlines()[:60])]
    kinds = (_REPLY, _HEADER_6, _TOTAL, _UNANSWERED)
    if any(kind.match(line) for line in lines for kind in kinds) or any(
        _HEADER.match(line) and "bytes" in line for line in lines
    ):
        return True
    windows = [line for line in lines if _REPLY_WINDOWS.fullmatch(line) or _HEADER_WINDOWS.fullmatch(line)]
    return any("ms" in line or "32" in line for line in windows)


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


def rows(lines: Iterator[str], source: Source) -> Iterator[Row]:
    run, inferred = _Run(src=source.vantage), 0
    windows, quiet = False, (0, 0)
    for line in short(lines):
        time_s, rest = stamped(line)
        if match := _REPLY.match(rest):
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
        elif any(quiet) and (match := _MEAN.match(rest)):
            yield from summary(time_s, run.src, run.dst, *quiet, number(match[1]))
            quiet = (0, 0)
        elif match := _REPLY_WINDOWS.fullmatch(rest):
            run.dst, windows = run.dst or match[1], True
            run.told, run.last_time = run.told + 1, time_s
            yield Row(time_s, run.src, run.dst, 0.5 if match["below"] == "<" else number(match["rtt"]))
        elif match := _HEADER_WINDOWS.fullmatch(rest):
            if not windows or run.dst != (match[1] or match[2]) or run.told:
                yield from run.lost()
                dst = match[1] or match[2]
                run = _Run(src=source.vantage_to(dst), dst=dst, is_whole=True)
            windows = True
        elif windows and run.dst and _TIMEOUT_WINDOWS.match(rest):
            run.told, run.last_time = run.told + 1, time_s
            yield Row(time_s, run.src, run.dst, None)
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
