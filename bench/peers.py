"""The input pipeline beside the loaders that one would otherwise use: the same rows, the same encoder, equal workers.

    python3 -m venv .venv-peers
    .venv-peers/bin/pip install -r bench/requirements-peers.txt
    .venv-peers/bin/pip install --no-deps --editable .
    .venv-peers/bin/python bench/peers.py

For each loader: real (non-padding) tokens per second with no, one and two worker processes; the share of padding; and
whether a run that is saved with two workers resumes with exactly the same batches with two, one and three. All of them
give batches of the same six arrays. Every figure comes from a process of its own. Rounds go through all loaders in turn
and the ratio is taken within a round, because a machine is rarely as fast now as it was a minute ago.
"""

import argparse
import importlib
import importlib.util
import json
import os
import pickle
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NoReturn

WORKERS: Final = (0, 1, 2)
SAVED_WITH: Final = 2
RESUMED_WITH: Final = (2, 1, 3)
BATCHES_BEFORE: Final = 7
"""Not a multiple of any number of workers, nor of the batches that are packed together."""
BATCHES_COMPARED: Final = 9
_PATIENCE_S: Final = 120.0


@dataclass(frozen=True, kw_only=True)
class Peer:
    title: str
    module: str
    opens: str
    """Of the module: what gives a loader."""
    needs: tuple[str, ...] = ()
    """Packages that may be missing: `module=distribution`."""

    def missing(self) -> list[str]:
        parts = (need.split("=") for need in self.needs)
        return [distribution for module, distribution in parts if importlib.util.find_spec(module) is None]


_TORCH: Final = ("torch=torch", "torchdata=torchdata")
PEERS: Final = {
    "ours": Peer(title="ping-llm", module="peer_ours", opens="OurLoader", needs=("grain=grain",)),
    "torch-pad": Peer(title="PyTorch DataLoader, padding", module="peer_torch", opens="padding", needs=_TORCH),
    "torch-pack": Peer(title="PyTorch DataLoader, greedy packing", module="peer_torch", opens="packing", needs=_TORCH),
    "streaming": Peer(
        title="MosaicML Streaming, packing in collate",
        module="peer_streaming",
        opens="packing",
        needs=("streaming=mosaicml-streaming", *_TORCH),
    ),
    "grain": Peer(title="Grain, first-fit packing", module="peer_grain", opens="packing", needs=("grain=grain",)),
    "grain-elastic": Peer(
        title="Grain, fixed contexts a batch, ElasticIterator",
        module="peer_grain",
        opens="elastic",
        needs=("grain=grain",),
    ),
}


# In a process of its own: one loader, one job.


def run_job(job: dict[str, Any]) -> None:
    """Do it and write down what came of it, before the loader is closed: closing may go wrong too."""
    from peer_common import Task

    peer, task = PEERS[job["peer"]], Task(**job["task"])
    result: dict[str, Any] = {}
    loader = None
    try:
        module = importlib.import_module(peer.module)
        if job["do"] == "prepare":
            if hasattr(module, "prepare"):
                module.prepare(task)
        else:
            state = pickle.loads(Path(job["state"]).read_bytes()) if job["do"] == "resume" else None
            resumable = job["do"] != "measure"
            loader = getattr(module, peer.opens)(task, job["workers"], state, resumable=resumable)
            result = _digests(loader, job) if resumable else _measure(loader, task, job["seconds"])
    except Exception as error:  # whatever a library raises is the result
        said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        result = {"error": " ".join(f"{type(error).__name__}: {said}".split())}
    Path(job["result"]).write_text(json.dumps(result))
    if loader is not None:
        loader.close()


def _measure(loader: Any, task: Any, seconds: float) -> dict[str, Any]:
    from peer_common import real_tokens

    shape = (task.sequences, task.length)
    batch = next(loader)
    if {tuple(array.shape) for array in batch.values()} != {shape} or len(batch) != 6:
        raise ValueError(f"batches have shapes {[tuple(array.shape) for array in batch.values()]}")
    warm = time.perf_counter() + seconds / 2
    while time.perf_counter() < warm:
        next(loader)
    tokens = batches = 0
    cpu_s, started = _cpu_seconds(), time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        tokens += real_tokens(next(loader))
        batches += 1
    cpu_s = _cpu_seconds() - cpu_s
    return {
        "tokens_per_s": tokens / elapsed,
        "tokens_per_cpu_s": tokens / cpu_s,
        "padding": 1 - tokens / (batches * task.sequences * task.length),
        "batches": batches,
    }


def _cpu_seconds() -> float:
    """Of this process and its workers, since they began."""
    import psutil

    here = psutil.Process()
    times = [process.cpu_times() for process in [here, *here.children(recursive=True)]]
    return sum(t.user + t.system for t in times)


def _digests(loader: Any, job: dict[str, Any]) -> dict[str, Any]:
    from peer_common import digest

    if job["do"] == "save":
        for _ in range(BATCHES_BEFORE):
            next(loader)
        Path(job["state"]).write_bytes(pickle.dumps(loader.state()))
    return {"digests": [digest(next(loader)) for _ in range(BATCHES_COMPARED)]}


# In the main process: what to run, and what came of it.


class Bench:
    def __init__(self, rows: Path, scratch: Path, seconds: float) -> None:
        self.scratch = scratch
        self.seconds = seconds
        self.task = {"rows": str(rows.resolve()), "scratch": str(scratch)}

    def run(self, peer: str, do: str, workers: int = 0) -> dict[str, Any]:
        """One job. What goes wrong is in the result under `error`."""
        result = self.scratch / "result.json"
        result.unlink(missing_ok=True)
        job = {"peer": peer, "do": do, "workers": workers, "seconds": self.seconds, "task": self.task}
        job |= {"state": str(self.scratch / f"{peer}.state"), "result": str(result)}
        command = [sys.executable, str(Path(__file__).resolve()), "--job", json.dumps(job)]
        # Libraries leave lock files where temporary files go: that is a folder which is removed in the end.
        environment = os.environ | {"TMPDIR": str(self.scratch)}
        log = self.scratch / "log"
        with log.open("wb") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, start_new_session=True)
            try:
                process.wait(timeout=_PATIENCE_S + 2 * self.seconds)
            except subprocess.TimeoutExpired:
                return {"error": "hangs when it is closed" if result.exists() else "hangs"}
            finally:
                _end_group(process)
        if not result.exists():
            lines = log.read_text(errors="replace").strip().splitlines()
            return {"error": f"died with status {process.returncode}: {lines[-1] if lines else ''}"}
        return json.loads(result.read_text())

    def resume(self, peer: str) -> dict[str, str]:
        """What happens when a run is saved and resumed with so many workers."""
        saved = self.run(peer, "save", SAVED_WITH)
        if "error" in saved:
            return {f"{SAVED_WITH}→{workers}": f"cannot be saved: {saved['error']}" for workers in RESUMED_WITH}
        outcomes = {}
        for workers in RESUMED_WITH:
            resumed = self.run(peer, "resume", workers)
            if "error" in resumed:
                outcome = f"error: {resumed['error']}"
            else:
                same = [a == b for a, b in zip(saved["digests"], resumed["digests"], strict=True)]
                outcome = "exact" if all(same) else f"other batches ({sum(same)} of {len(same)} the same), no error"
            outcomes[f"{SAVED_WITH}→{workers}"] = outcome
        return outcomes


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End whatever is left of a job: first asking, so that Python's resource tracker can give back shared memory."""
    for number, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        until = time.monotonic() + patience_s
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            while time.monotonic() < until:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.02)
            continue
        break
    process.wait()


def compare(bench: Bench, names: Sequence[str], rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in names:
        missing = PEERS[name].missing()
        note = f"missing: {', '.join(missing)}" if missing else bench.run(name, "prepare").get("error")
        results[name] = {"title": PEERS[name].title, "runs": []}
        if note:
            results[name]["not_measured"] = note
            _say(f"{PEERS[name].title}: not measured: {note}")
    measured = [name for name in names if "not_measured" not in results[name]]
    for number in range(rounds):
        for workers in WORKERS:
            for name in measured:
                run = bench.run(name, "measure", workers)
                results[name]["runs"].append({"round": number, "workers": workers, **run})
                shown = run.get("error") or f"{run['tokens_per_s'] / 1e6:.2f} M tokens/s"
                _say(f"round {number + 1} of {rounds}, {workers} workers, {PEERS[name].title}: {shown}")
    for name in measured:
        results[name]["resume"] = bench.resume(name)
        _say(f"{PEERS[name].title}: {results[name]['resume']}")
    return results


def summarise(results: dict[str, Any]) -> dict[str, Any]:
    """Medians over the rounds."""
    ours = {(run["round"], run["workers"]): run for run in results.get("ours", {}).get("runs", ())}
    for result in results.values():
        good = [run for run in result["runs"] if "error" not in run]
        by_workers = {w: [run for run in good if run["workers"] == w] for w in WORKERS}
        for quantity in ("tokens_per_s", "tokens_per_cpu_s"):
            result[quantity] = {w: _median(run[quantity] for run in runs) for w, runs in by_workers.items()}
            result[f"ours_over_{quantity}"] = {
                w: _median(
                    ours[run["round"], w][quantity] / run[quantity]
                    for run in runs
                    if quantity in ours.get((run["round"], w), ())
                )
                for w, runs in by_workers.items()
            }
        result["padding"] = _median(run["padding"] for run in good)
        changed = [
            outcome for name, outcome in result.get("resume", {}).items() if name != f"{SAVED_WITH}→{SAVED_WITH}"
        ]
        result["exact_resume_with_changed_workers"] = bool(changed) and all(o == "exact" for o in changed)
    return results


def _median(values: Iterator[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def table(results: dict[str, Any]) -> str:
    """Markdown."""
    head = ["loader", *(f"{w} worker{'s' * (w != 1)}" for w in WORKERS), "ours is faster", "per CPU second", "padding"]
    lines = [[*head, "exact resume with changed workers"], ["---", *["---:"] * (len(head) - 1), "---"]]
    for result in results.values():
        if "not_measured" in result:
            lines.append([result["title"], f"not measured: {result['not_measured']}", *[""] * (len(head) - 1)])
            continue
        rates = [_shown(result["tokens_per_s"][w], 1e6, " M", 2) for w in WORKERS]
        ratios = [
            " / ".join(_shown(result[f"ours_over_{quantity}"][w], 1, "×", 1) for w in WORKERS)
            for quantity in ("tokens_per_s", "tokens_per_cpu_s")
        ]
        padding = _shown(result["padding"], 0.01, " %", 1)
        lines.append([result["title"], *rates, *ratios, padding, _resume_shown(result)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(value: float | None, unit: float, name: str, digits: int) -> str:
    return "–" if value is None else f"{value / unit:.{digits}f}{name}"


def _resume_shown(result: dict[str, Any]) -> str:
    if result["exact_resume_with_changed_workers"]:
        return "yes"
    details = "; ".join(f"{name} {outcome[:90].replace('|', '/')}" for name, outcome in result["resume"].items())
    return f"no: {details}"


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder that goes away whatever happens, short of being killed outright."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    folder = Path(tempfile.mkdtemp(prefix="ping-llm-peers-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _simulated_rows(measurements: int, folder: Path) -> Path:
    from ping_llm.rows.prepare import PrepareSettings, prepare
    from ping_llm.sources.simulator import SimulatorSettings, simulate

    _say(f"simulating and preparing {measurements:,} measurements")
    simulate(SimulatorSettings(measurements=measurements), folder / "raw")
    prepare(PrepareSettings(inputs=(str(folder / "raw"),), output=folder / "rows"))
    return folder / "rows"


def _check_rows(folder: Path, parser: argparse.ArgumentParser) -> None:
    from ping_llm.core.errors import PingLlmError
    from ping_llm.rows.dataset import RowSet

    try:
        RowSet(folder, "train")
    except PingLlmError as error:
        parser.error(str(error))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cores": str(len(os.sched_getaffinity(0)))}
    for distribution in ("numpy", "torch", "torchdata", "mosaicml-streaming", "grain", "array_record"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[distribution] = version(distribution)
    return found


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="prepared rows; without it, simulated ones in a temporary folder")
    parser.add_argument("--measurements", type=int, default=2_000_000, help="how many to simulate")
    parser.add_argument("--seconds", type=float, default=3.0, help="of measuring for each figure, after a warm-up")
    parser.add_argument("--rounds", type=int, default=3, help="figures are medians over so many")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="which loaders")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, not as a table")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        run_job(json.loads(arguments.job))
        return
    if arguments.rows:
        _check_rows(arguments.rows, parser)
    with _scratch() as scratch:
        rows = arguments.rows or _simulated_rows(arguments.measurements, scratch)
        results = summarise(compare(Bench(rows, scratch, arguments.seconds), arguments.peers, arguments.rounds))
    if arguments.json:
        sys.stdout.write(json.dumps({"versions": _versions(), "results": results}, indent=2) + "\n")
    else:
        sys.stdout.write(table(results) + "\n\n" + ", ".join(f"{k} {v}" for k, v in _versions().items()) + "\n")


if __name__ == "__main__":
    main()
