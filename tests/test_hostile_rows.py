"""Whatever an index and its records say: batches are an error of one line, or they are sound. Never a crash.

The trials run in a process of their own, straight on the batch builder, without the checksums that a whole dataset has:
of an index only what it says is checked.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ping_llm.contexts.plan import RowFacts, SequencePlan
from ping_llm.contexts.source import RowSequences
from ping_llm.contexts.spec import ContextSettings
from ping_llm.core.errors import PingLlmError
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.manifest import INDEX_TYPES, index_fault
from ping_llm.tokens.decode import decode
from pipeline_fixtures import histories, prepare_table

LENGTHS = (64, 1024)
Change = Callable[[npt.NDArray[Any]], Any]


class HostileRows(RowSet):
    """Rows of which a column of the index says something else."""

    def __init__(self, folder: Path, name: str, change: Change) -> None:
        super().__init__(folder)
        changed = np.array(super().column(name))
        change(changed)
        changed.flags.writeable = False
        self._columns[name] = changed
        if fault := index_fault(self._columns, self.info):
            raise PingLlmError(fault)


def tried(open_rows: Callable[[], RowSet], length: int) -> str:
    """What became of some batches: `error`, or `sound` (all tokens can be decoded); anything else is a fault."""
    try:
        rows = open_rows()
        plan = SequencePlan(RowFacts.of(rows), 1, ContextSettings(length=length))
        segments = RowSequences(rows, plan).segments(range(min(24, plan.sequences_per_epoch)))
    except PingLlmError as error:
        return "error" if "\n" not in str(error) and "internal" not in str(error) else f"unclear: {error}"
    packed = segments.packed
    for tokens in np.split(packed.tokens, np.cumsum(packed.sizes)[:-1]):
        if (decoded := decode(tokens)).problem or decoded.truncated:
            return f"malformed: {decoded.problem or 'truncated'}"
    return "sound"


def changes(kind: str, rng: np.random.Generator) -> list[Change]:
    """All rows or one set to the extremes of the type, bits flipped, values shuffled or off by one."""
    if kind == "V16":
        return [lambda column: column.fill(255)]
    extremes = np.iinfo(kind)
    values = [0, 1, 2, extremes.max, extremes.max // 2, extremes.max - 7, extremes.min]
    one_bit = [np.array(1, kind) << np.array(bit, kind) for bit in range(np.dtype(kind).itemsize * 8)]

    def at(index: Any, value: Any) -> Change:
        return lambda column: column.__setitem__(index, value)

    def flip(row: int, bit: Any) -> Change:
        return lambda column: column.__setitem__(row, column[row] ^ bit)

    return [
        *(at(where, value) for value in values for where in (slice(None), 3, slice(0, 40))),
        *(flip(int(rng.integers(0, 60)), bit) for bit in one_bit),
        rng.shuffle,
        lambda column: np.add(column, 1, out=column),
    ]


def run_trials(folder: Path) -> None:
    rng = np.random.default_rng(5)
    outcomes: dict[str, int] = {}

    def count(outcome: str, what: str) -> None:
        if outcome not in ("error", "sound"):
            sys.exit(f"{what}: {outcome}")
        outcomes[outcome] = outcomes.get(outcome, 0) + 1

    for name, kind in INDEX_TYPES.items():
        for number, change in enumerate(changes(kind, rng)):
            for length in LENGTHS:
                count(tried(partial(HostileRows, folder, name, change), length), f"{name}, change {number}")
    shard = next(folder.glob("train*.arrayrecord"))
    sound = shard.read_bytes()
    for number in range(200):
        damaged = bytearray(sound)
        for _ in range(int(rng.integers(1, 40))):
            damaged[int(rng.integers(0, len(damaged)))] = int(rng.integers(0, 256))
        shard.write_bytes(damaged)
        count(tried(partial(RowSet, folder), LENGTHS[number % 2]), f"record bytes, trial {number}")
    sys.stdout.write(f"{outcomes['error']} {outcomes['sound']}\n")


def test_hostile_index_columns_and_record_bytes_end_in_an_error_or_a_sound_batch() -> None:
    sizes = [1, 2, 3, 10, *range(20, 74), 3_000, 9_000]
    folder = prepare_table(histories(sizes, gap_us=200_000_000)).folder
    done = subprocess.run([sys.executable, __file__, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    errors, sound = map(int, done.stdout.split())
    assert errors > 300  # the trials were hostile
    assert sound > 50


if __name__ == "__main__":
    run_trials(Path(sys.argv[1]))
