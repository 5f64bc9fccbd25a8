"""SmokePing's round-robin databases: `rrdtool dump` (XML), `rrdtool fetch FILE AVERAGE` (text), or the file itself.

A database keeps, for each step of mostly 300 s, the sorted RTTs `ping1`, `ping2`, … in seconds and the number of lost
packets. Only what is as fine as the step is read: further back it keeps averages, which nobody has measured. The target
is not in the file but is its name: `AmsterdamGW.rrd`, or `AmsterdamGW~paris.rrd` where the slave `paris` pings.

The dump is read line by line as rrdtool writes it, not by an XML parser: there are no entities to expand.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ping_llm.core.errors import PingLlmError, shown
from ping_llm.sources.formats import Row, Source, number

MAGIC: Final = b"RRD\0"

_NAME: Final = re.compile(r"\s*<name>\s*(\S+?)\s*</name>")
_STEPS: Final = re.compile(r"\s*<pdp_per_row>\s*(\d+)")
_FUNCTION: Final = re.compile(r"\s*<cf>\s*(\w+)")
_ROW: Final = re.compile(r"\s*<!--.*?(\d{9,10})\s*-->\s*<row>(.*)</row>")
_VALUE: Final = re.compile(r"<v>\s*([^<]*?)\s*</v>")
_FETCHED: Final = re.compile(r"\s*(\d{9,10}):((?:\s+[-+\w.,]+)+)\s*")
_PING: Final = re.compile(r"ping(\d+)")


def matches(head: str) -> bool:
    return head.startswith(MAGIC.decode()) or "<rrd>" in head or _is_fetched(head)


def _is_fetched(head: str) -> bool:
    names = head.split("\n", 1)[0].split()
    return "ping1" in names or {"loss", "median"} <= set(names)


def dumped(path: Path) -> Iterator[str]:
    """The lines of `rrdtool dump` of a database."""
    program = shutil.which("rrdtool")
    if program is None:
        raise PingLlmError(f"{path} is a round-robin database: install rrdtool, or give the output of rrdtool dump")
    command = [program, "dump", str(path.absolute())]
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, errors="replace") as process,
    ):
        assert process.stdout is not None
        try:
            yield from process.stdout
            if process.wait():
                said.seek(0)
                raise PingLlmError(
                    f"rrdtool cannot read {path}: {shown(said.read(500).decode(errors='replace').strip())}"
                )
        finally:
            process.kill()


def rows(lines: Iterator[str], source: Source) -> Iterator[Row]:
    target, _, slave = source.name.partition("~")
    src = source.labels.get("src_addr") or slave or "localhost"
    dst = source.labels.get("dst_addr") or target or "target"
    names: list[str] = []
    function, finest = "", False
    for line in lines:
        if match := _ROW.match(line):
            if finest:
                yield from _step(float(match[1]), names, _VALUE.findall(match[2]), src, dst)
        elif match := _FETCHED.fullmatch(line):
            yield from _step(float(match[1]), names, match[2].split(), src, dst)
        elif match := _NAME.match(line):
            names.append(match[1])
        elif match := _FUNCTION.match(line):
            function = match[1]
        elif match := _STEPS.match(line):
            finest = function == "AVERAGE" and int(match[1][:9]) == 1
        elif not names and _is_fetched(line):
            names = line.split()
    if names and not any(_PING.fullmatch(name) for name in names) and "median" not in names:
        raise PingLlmError(f"a round-robin database, but not of SmokePing: it has {shown(', '.join(names))}")


def _step(time_s: float, names: list[str], values: list[str], src: str, dst: str) -> Iterator[Row]:
    """The packets of one step. `loss` is not always whole: rrdtool moves values to the borders of its steps."""
    known = {name: number(value.replace(",", ".")) for name, value in zip(names, values, strict=False)}
    sent = sum(1 for name in names if _PING.fullmatch(name))
    found = [value for name, value in known.items() if value is not None and _PING.fullmatch(name)]
    loss, median = known.get("loss"), known.get("median")
    if not sent and median is not None:  # without the single packets
        found, sent = [median], 1
    if loss is None and not found:
        return  # nothing was measured
    lost = min(round(loss), sent) if loss is not None and 0 <= loss <= 1e6 else sent - len(found)
    for value in sorted(found)[: sent - lost]:
        yield Row(time_s, src, dst, value * 1000)
    yield from (Row(time_s, src, dst, None) for _ in range(lost))
