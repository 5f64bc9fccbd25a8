"""Run by test_row_faults.py in a process of its own: damages rows over and over, and says what each read gave."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from ping_llm.batches.batch import digest
from ping_llm.core.errors import PingLlmError
from ping_llm.core.files import file_sha256
from ping_llm.rows.manifest import INDEX_TYPES, Manifest, parse
from ping_llm.rows.shards import index_table, write_index
from pipeline_fixtures import Dataset

OUT_OF_RANGE = [0, 1, 3, 255, 2**31, 2**32 - 1, 2**50, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63)]


def batch_of(folder: Path) -> str:
    """An epoch of the rows, in which each of them is read."""
    builder = Dataset(folder).builder(length=256)
    return digest(builder.build(range(builder.plan.sequences_per_epoch)))


def outcome(folder: Path, expected: str) -> str:
    try:
        return "same" if batch_of(folder) == expected else "another batch"
    except PingLlmError as error:
        return f"several lines: {error}" if "\n" in str(error) else f"error: {error}"


def flip(folder: Path, count: int, seed: int, say: Callable[[str, str], None]) -> None:
    """One bit of the index, a shard or the manifest at a time."""
    rng, expected = np.random.default_rng(seed), batch_of(folder)
    paths = [path for path in sorted(folder.iterdir()) if path.stat().st_size and path.name != "eval.index"]
    for number in range(count):
        path = paths[number % len(paths)]
        at, bit = int(rng.integers(path.stat().st_size)), int(rng.integers(8))
        for write in (True, False):  # and back again
            with path.open("r+b") as file:
                file.seek(at)
                (byte,) = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 1 << bit]))
            if write:
                say(f"{path.name} byte {at} bit {bit}", outcome(folder, expected))


def forge(folder: Path, say: Callable[[str, str], None]) -> None:
    """An index with one number that cannot be, and a manifest that vouches for it."""
    expected, path = batch_of(folder), folder / "train.index"
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
            manifest["fingerprint"] = parse(Manifest, manifest, "it").fingerprint
            (folder / "manifest.json").write_text(json.dumps(manifest))
            say(f"{name}={value}", outcome(folder, expected))


if __name__ == "__main__":
    kind, folder, *numbers = sys.argv[1:]
    outcomes: dict[str, str] = {}
    if kind == "flip":
        flip(Path(folder), int(numbers[0]), int(numbers[1]), outcomes.__setitem__)
    else:
        forge(Path(folder), outcomes.__setitem__)
    json.dump(outcomes, sys.stdout)
