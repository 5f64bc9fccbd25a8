"""One bit of a file at a time: the same result or an error of one line, never a crash and never another result.

Only texts that are yours to edit have no checksum: what a damaged one says, if it says anything, is taken as meant.
"""

import hashlib
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pytest
from fault_trials import Tell
from jobs import BUCKET, JOBS, Bench, Job, train
from supervisor import supervise

from ping_llm.core.errors import PingLlmError
from ping_llm.core.files import file_sha256

OUT_OF_RANGE: Final = [0, 1, 3, 255, 2**31, 2**32 - 1, 2**50, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63)]


def _batches(folder: Path) -> str:
    """An epoch of the rows, in which each of them is read."""
    from ping_llm.batches.batch import digest
    from pipeline_fixtures import Dataset, arrays_of

    builder = Dataset(folder).builder(length=256)
    return digest(arrays_of(builder, range(builder.sequences_per_epoch)))


def _weights(folder: Path) -> str:
    import jax

    from ping_llm.runs.trained import load_trained

    leaves = jax.tree.leaves(load_trained(folder).weights)
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()


def _split(folder: Path) -> str:
    from ping_llm.evaluate.split import read_split

    found = read_split(folder)
    parts = (found.train, found.history, *found.questions.values())
    columns = b"".join(column.tobytes() for part in parts for column in vars(part).values())
    return hashlib.sha256(columns + repr((found.nodes, found.cut_time_s, [*found.questions])).encode()).hexdigest()


def _report(folder: Path) -> str:
    sys.argv = ["ping-llm", "report", str(folder)]
    from ping_llm.cli.main import app

    app(standalone_mode=False)
    return "a page"


@dataclass(frozen=True)
class Kind:
    folder: str
    """Of the pool."""
    files: str
    read: Callable[[Path], str]
    flips: int
    has_checksum: bool = True


KINDS: Final = {
    "index of rows": Kind("rows", "train.index", _batches, 800),
    "shard": Kind("rows", "train*.arrayrecord", _batches, 800),
    "manifest": Kind("rows", "manifest.json", _batches, 800),
    "checkpoint": Kind("runs", "ping-llm/tiny/checkpoints/2/**/*", lambda f: _weights(f / "ping-llm/tiny"), 60),
    "exported model": Kind("model", "[!R]*", _weights, 200),
    "completer": Kind("completer", "[!R]*", _weights, 60),
    "split": Kind("split", "**/*", _split, 300),
    "config.yml of a run": Kind("runs", "ping-llm/tiny/config.yml", lambda f: _weights(f / "ping-llm/tiny"), 60, False),
    "metrics of a run": Kind("runs", "ping-llm/tiny/*.json*", lambda f: _report(f / "ping-llm/tiny"), 60, False),
}  # fmt: skip


@contextmanager
def flipped(file: Path, at: int, bit: int) -> Iterator[None]:
    saved = file.read_bytes()
    file.write_bytes(saved[:at] + bytes([saved[at] ^ 1 << bit]) + saved[at + 1 :])
    try:
        yield
    finally:
        file.write_bytes(saved)


def outcome(read: Callable[[Path], str], folder: Path, expected: str, other: str) -> str:
    try:
        return "same" if read(folder) == expected else other
    except (PingLlmError, OSError) as error:
        return "one line" if "\n" not in str(error) else f"several lines: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def flip_all(kind: Kind, folder: Path) -> None:
    """Say how each trial ended, a line at a time: the last line tells where a crash was."""
    rng, expected = np.random.default_rng(1), kind.read(folder)
    files = sorted(path for path in folder.glob(kind.files) if path.is_file() and path.stat().st_size)
    for number in range(kind.flips):
        file = files[number % len(files)]
        at, bit = int(rng.integers(file.stat().st_size)), int(rng.integers(8))
        with flipped(file, at, bit):
            other = "another result" if kind.has_checksum else "as read"
            say(f"{file.name} byte {at} bit {bit}", outcome(kind.read, folder, expected, other))


def forge_all(folder: Path) -> None:
    """An index with one number that cannot be, and a manifest that vouches for it: whatever comes, it is no crash."""
    from ping_llm.rows.manifest import INDEX_TYPES, Manifest
    from ping_llm.rows.shards import index_table, write_index

    path = folder / "train.index"
    with pa.ipc.open_file(path.read_bytes()) as file:
        stored = file.read_all()
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, kind in list(INDEX_TYPES.items())[:-1]:
        for value in (value for value in OUT_OF_RANGE if np.iinfo(kind).min <= value <= np.iinfo(kind).max):
            columns = [np.frombuffer(stored[n].chunk(0).buffers()[1], k).copy() for n, k in INDEX_TYPES.items()]
            columns[list(INDEX_TYPES).index(name)][1] = value
            write_index(index_table(columns), path)
            split = manifest["splits"]["train"]
            split |= {"index_sha256": file_sha256(path), "index_bytes": path.stat().st_size}
            manifest["fingerprint"] = Manifest.parse(manifest, "it").fingerprint
            (folder / "manifest.json").write_text(json.dumps(manifest))
            say(f"{name}={value}", outcome(_batches, folder, "", "as read"))


def say(what: str, came: str) -> None:
    sys.stderr.write(json.dumps([what, came]) + "\n")


def outcomes(action: Callable[[], Any], bench: Bench) -> tuple[Counter[str], list[Any]]:
    ended = supervise(action, bench.trial)
    found = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("[")]
    if ended.code != 0:
        found.append(["after the last", f"ended with {ended.code}: {ended.stderr[-1500:]}"])
    return Counter(came for _, came in found), [(a, b) for a, b in found if b not in ("same", "one line", "as read")]


@pytest.mark.parametrize("name", KINDS)
def test_a_flipped_bit_is_one_line_or_changes_nothing(bench: Bench, name: str, tell: Tell) -> None:
    from ping_llm.runs.trained import SHIPPED

    kind = KINDS[name]
    bench.begin(Job(kind.read, (), ""))
    folder = bench.trial / kind.folder
    shutil.copytree(SHIPPED if kind.folder == "completer" else bench.pool / kind.folder, folder)
    found, failures = outcomes(lambda: flip_all(kind, folder), bench)
    tell(name, "flipped bit", found)
    assert not failures
    assert found["one line"] or not kind.has_checksum
    assert found.total() == kind.flips


def test_numbers_of_a_forged_index_lead_no_kernel_astray(bench: Bench, tell: Tell) -> None:
    bench.begin(Job(forge_all, ("rows",), ""))
    found, failures = outcomes(lambda: forge_all(bench.trial / "rows"), bench)
    tell("index of rows", "forged number", found)
    assert not failures
    assert found["one line"] > 50


@pytest.mark.parametrize("name", ["mirror.json of a run in a store", "ledger of an import"])
def test_a_flipped_bit_of_a_list_of_files_is_one_line_or_mended(bench: Bench, name: str, tell: Tell) -> None:
    job = JOBS["copy from a store" if "mirror" in name else "import per file"]
    bench.begin(job)
    assert bench.run(job).code == 0
    expected, ledger = bench.tree(job), bench.trial / "in" / "ledger" / "a.json.json"
    whole = (bench.pool / "s3 run" / "mirror.json" if "mirror" in name else ledger).read_bytes()
    written = {path: path.read_bytes() for path in (bench.trial / "in").rglob("*") if path.is_file()}
    found: Counter[str] = Counter()
    rng = np.random.default_rng(2)
    for _ in range(25):
        at, bit = int(rng.integers(len(whole))), int(rng.integers(8))
        damaged = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
        if "mirror" in name:
            shutil.rmtree(bench.trial / "runs", ignore_errors=True)
            bench.store.put(f"{BUCKET}/run/mirror.json", damaged)
        else:
            for path, content in written.items():
                path.write_bytes(content)
            ledger.write_bytes(damaged)
        ended = bench.run(job)
        is_same = bench.tree(job) in (expected, {} if "mirror" in name else expected)  # nothing, or all of it
        came = "same" if ended.code == 0 else "one line" if ended.is_one_line else ended.stderr[-500:]
        found[came if is_same else f"byte {at} bit {bit}: another result"] += 1
    tell(name, "flipped bit", found)
    assert {*found} <= {"same", "one line"}, found


def test_a_run_whose_records_are_damaged_is_resumed_or_refused_in_one_line(bench: Bench, tell: Tell) -> None:
    found: Counter[str] = Counter()
    rng = np.random.default_rng(3)
    for name in ("metrics.jsonl", "sessions.jsonl", "config.yml") * 2:
        job = Job(train(3), ("rows", "runs"), "runs")
        bench.begin(job)
        file = bench.trial / "runs/ping-llm/tiny" / name
        content = bytearray(file.read_bytes())
        content[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
        file.write_bytes(content)
        ended = bench.run(job)
        found["as read" if ended.code == 0 else "one line" if ended.is_one_line else ended.stderr[-800:]] += 1
    tell("records of a run, resumed", "flipped bit", found)
    assert {*found} <= {"as read", "one line"}, found
