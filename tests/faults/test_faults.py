"""A command is disturbed at each of its system calls; then the same command gives the result of an undisturbed one.

kill        `kill -9` instead of a call that changes a name or a file, or that sends to a store
full disk   from a write on, nothing more can be written
twice       at a call of the first process, a second one is started and runs to its end
power       a file that gets its name must be on the disk: written, then synced, then renamed or linked
"""

import errno
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from fault_trials import Tell
from jobs import JOBS, Bench, Job, Tree, visible
from supervisor import KILL, NAMES, SENDS, SYNCS, WRITES, Call, Ended, supervise

from ping_llm.rows.manifest import INDEX_TYPES
from ping_llm.rows.shards import index_table, join_indexes

POINTS: Final = int(os.environ.get("FAULT_POINTS", "6"))

"""Calls of a job at which it is disturbed, evenly spaced over all of them."""


class Undisturbed:
    """A job's calls, what it began with and what it makes."""

    def __init__(self, bench: Bench, job: Job) -> None:
        self.bench, self.job = bench, job
        bench.begin(job)
        self.before = bench.tree(job)
        self.calls: list[Call] = []
        self.unsynced: set[str] = set()
        self._dirty: set[int] = set()
        self._is_named = False
        ended = bench.run(job, self._note)
        self._check_synced()
        assert ended.code == 0, ended.stderr
        self.result = bench.result(job)
        self.after = bench.tree(job)

    def _note(self, call: Call) -> int:
        if self.is_ours(call):
            self.calls.append(call)
            if self._is_named:
                self._check_synced()
            self._is_named = call.name in NAMES
            path = Path(call.path)
            if call.name in WRITES | SYNCS and path.is_file():
                (self._dirty.discard if call.name in SYNCS else self._dirty.add)(path.stat().st_ino)
        return 0

    def _check_synced(self) -> None:
        """What can be seen under its name now must be on the disk."""
        for name in visible(dict.fromkeys(self.bench.names(self.job), "")):
            with suppress(FileNotFoundError):
                if (self.bench.trial / name).stat().st_ino in self._dirty:
                    self.unsynced.add(name)

    def is_ours(self, call: Call) -> bool:
        is_upload = call.name in SENDS and call.path.startswith("socket:") and self.job.output.startswith("s3://")
        return is_upload or call.path.startswith(f"{self.bench.trial}/")

    def points(self, names: frozenset[str] | None = None) -> list[int]:
        """Positions among our calls, or among those with these names."""
        count = sum(names is None or call.name in names for call in self.calls)
        return sorted({round(i * (count - 1) / max(1, POINTS - 1)) for i in range(POINTS)}) if count else []

    def at(
        self, position: int, answer: Callable[[], int], names: frozenset[str] | None = None
    ) -> Callable[[Call], int]:
        """Let calls through, and answer that one, and all that follow it."""
        seen = 0

        def decide(call: Call) -> int:
            nonlocal seen
            if not self.is_ours(call) or (names is not None and call.name not in names):
                return 0
            seen += 1
            return answer() if seen > position else 0

        return decide

    def half_done(self, now: Tree) -> str | None:
        """A file that is neither what was there before nor what is to come."""
        now = visible(now)
        if self.job.whole and now not in (visible(self.before), visible(self.after)):
            return "neither the old folder nor the new one"
        known = {*self.before.items(), *self.after.items()}
        return next((f"{name} is half done" for name, digest in now.items() if (name, digest) not in known), None)

    def judge(self, ended: Ended, *, is_killed: bool) -> str:
        """After a disturbance: run the same command again."""
        if not is_killed and ended.code != 0 and not ended.is_one_line:
            return f"ended with {ended.code}: {ended.stderr[-1500:]}"
        if fault := self.half_done(self.bench.tree(self.job)):
            return fault
        first = "same" if is_killed or ended.code == 0 else "one line"
        again = self.bench.run(self.job)
        if again.code != 0 and not again.is_one_line:
            return f"the second run ended with {again.code}: {again.stderr[-1500:]}"
        if (result := self.bench.result(self.job)) != self.result:
            return f"another result: {different(self.result, result)} ({again.stderr[-500:]})"
        return first if again.code == 0 else "one line"  # as an import, which replaces nothing that is complete


def different(expected: Any, found: Any) -> Any:
    if isinstance(expected, dict) and isinstance(found, dict):
        return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))[:5]
    return [different(*pair) for pair in zip(expected, found, strict=True)] if isinstance(expected, tuple) else found


@pytest.fixture(scope="module", params=JOBS)
def undisturbed(request: pytest.FixtureRequest, bench: Bench) -> tuple[str, Undisturbed]:
    return request.param, Undisturbed(bench, JOBS[request.param])


def trials(
    undisturbed: tuple[str, Undisturbed], fault: str, tell: Tell, points: list[int], trial: Callable[[int], str]
) -> None:
    name, of = undisturbed
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    for point in points:
        of.bench.begin(of.job)
        outcomes[outcome := trial(point)] += 1
        if outcome not in ("same", "one line"):
            failures.append(f"at call {point}: {outcome}")
    tell(name, fault, outcomes)
    assert not failures, "\n".join(failures[:10])


def test_killed_at_a_call(undisturbed: tuple[str, Undisturbed], tell: Tell) -> None:
    of = undisturbed[1]

    def trial(point: int) -> str:
        return of.judge(of.bench.run(of.job, of.at(point, lambda: KILL)), is_killed=True)

    trials(undisturbed, "kill", tell, of.points(), trial)


def test_the_disk_is_full_from_a_write_on(undisturbed: tuple[str, Undisturbed], tell: Tell) -> None:
    of = undisturbed[1]

    def trial(point: int) -> str:
        return of.judge(of.bench.run(of.job, of.at(point, lambda: errno.ENOSPC, WRITES)), is_killed=False)

    trials(undisturbed, "full disk", tell, of.points(WRITES), trial)


def test_started_twice(undisturbed: tuple[str, Undisturbed], tell: Tell) -> None:
    of = undisturbed[1]

    def trial(point: int) -> str:
        second: list[Ended] = []

        def start() -> int:
            if not second:
                second.append(of.bench.run(of.job))
            return 0

        first = of.bench.run(of.job, of.at(point, start))
        for ended in (first, *second):
            if ended.code != 0 and not ended.is_one_line:
                return f"ended with {ended.code}: {ended.stderr[-1500:]}"
        if (result := of.bench.result(of.job)) != of.result:
            return f"another result: {different(of.result, result)} ({first.stderr[-300:]}, {second[0].stderr[-300:]})"
        return "same" if first.code == second[0].code == 0 else "one line"

    trials(undisturbed, "twice", tell, of.points()[::3], trial)


def test_what_gets_a_name_is_on_the_disk(undisturbed: tuple[str, Undisturbed], tell: Tell) -> None:
    name, of = undisturbed
    named = sum(call.name in NAMES for call in of.calls)
    tell(name, "power", Counter({"same": named - len(of.unsynced), "unsynced": len(of.unsynced)}))
    assert not of.unsynced


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """A disk of memory pages: whatever is written to it counts, through mappings too, which are no calls."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a disk of memory can be mounted by root only")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_small_disk_is_one_line_or_large_enough(bench: Bench, tell: Tell) -> None:
    job = JOBS["prepare"]
    found: Counter[str] = Counter()
    for kilobytes in range(150, 1250, 100):
        bench.begin(job)
        with small_disk(bench.trial / "rows", kilobytes):
            ended = bench.run(job)
        came = (
            "same" if ended.code == 0 else "one line" if ended.is_one_line else f"{ended.code}: {ended.stderr[-900:]}"
        )
        found[came] += 1
    tell("prepare", "small disk", found)
    assert {*found} == {"same", "one line"}, found


def test_an_index_that_does_not_fit_the_disk_is_an_error(bench: Bench) -> None:
    rows = 200_000
    part = index_table([np.zeros(rows, kind) for kind in INDEX_TYPES.values()])
    bench.begin(JOBS["prepare"])
    with small_disk(bench.trial / "disk", 6_000):
        ended = supervise(lambda: join_indexes([part], rows, Path("disk/train.index")), bench.trial)
    assert ended.code > 0
    assert "No space left on device" in ended.stderr
