"""Peak memory of a command and all the processes it starts."""

import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from ping_llm.errors import PingLlmError


@dataclass(frozen=True, kw_only=True)
class Measured:
    seconds: float
    peak_rss_mb: float
    output: str


def run_measured(command: Sequence[str], *, every_s: float = 0.05) -> Measured:
    """Run a command and watch it. Resident sets are added up, so pages that processes share count more than once."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(every_s):
            peak = max(peak, _tree_rss(process.pid))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        output, errors = process.communicate()
    finally:
        process.kill()
        done.set()
        watcher.join()
    if process.returncode:
        raise PingLlmError(f"{' '.join(command[:4])} … failed: {errors.strip()[-300:]}")
    return Measured(seconds=time.perf_counter() - started, peak_rss_mb=peak / 1e6, output=output)


def _tree_rss(pid: int) -> int:
    total = 0
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                total += process.memory_info().rss
            except psutil.Error:  # ended in between
                continue
    except psutil.Error:
        pass
    return total
