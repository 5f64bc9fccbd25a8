"""Sequences to arrays: read, sample, encode and pack many sequences in one pass over flat columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from ping_llm.pipeline.contexts import (
    Arrangement,
    Units,
    arrange,
    candidate_limit,
    draw_positions,
    keeps_time,
    measurement_words,
)
from ping_llm.pipeline.fill import Candidates, fill
from ping_llm.pipeline.plan import SequencePlan
from ping_llm.pipeline.randomness import Ints
from ping_llm.pipeline.timing import Stages
from ping_llm.rows.mapped import CorruptRowError, MappedRows
from ping_llm.tokens.encode import EncodableMeasurements, encode

Batch = dict[str, npt.NDArray[np.int32]]


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The contexts of some sequences, chosen and arranged: what becomes tokens, and what `inspect batch` explains."""

    units: Units
    sequence: Ints
    """Sequence of each unit, counted from 0 within the request."""
    unit: Ints
    position: Ints
    """Of each measurement, in the order in which it is written: its unit, and its position in the unit's row."""
    arrangement: Arrangement
    measurements: EncodableMeasurements


@dataclass(frozen=True, kw_only=True)
class PackedTokens:
    """All that is needed to lay out a batch: a twelfth of its bytes, which is what travels between processes."""

    tokens: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
    """Of probe rows 16 bits, of text 32."""
    sizes: npt.NDArray[np.int32]
    """Tokens of each segment."""
    sequence: npt.NDArray[np.int32]
    """Sequence of each segment."""


class BatchBuilder:
    """Builds any sequences of a plan from the rows it was made for."""

    def __init__(
        self,
        rows: MappedRows,
        plan: SequencePlan,
        stages: Stages | None = None,
        *,
        skip_corrupt_rows: bool = False,
    ) -> None:
        self.rows = rows
        self.plan = plan
        self.stages = stages or Stages()
        self.skip_corrupt_rows = skip_corrupt_rows
        self.corrupt_rows: dict[int, str] = {}
        """Rows that were left out, with what is wrong with them."""

    def build(self, sequences: Sequence[int]) -> Batch:
        """The arrays of these sequences, in this order."""
        return expand(self.tokens(sequences), len(sequences), self.plan.settings.length)

    def tokens(self, sequences: Sequence[int]) -> PackedTokens:
        segments = self.segments(sequences)
        with self.stages("encode"):
            tokens, lengths = encode(segments.measurements)
            sizes = np.bincount(segments.unit, weights=lengths, minlength=len(segments.units))
            return PackedTokens(
                tokens=tokens, sizes=sizes.astype(np.int32), sequence=segments.sequence.astype(np.int32)
            )

    def segments(self, sequences: Sequence[int]) -> Segments:
        length = self.plan.settings.length
        with self.stages("plan"):
            units, elastic, wanted, sequence = self._units(sequences)
        with self.stages("read"):
            sound = self._sound(units.row)
            if not sound.all():
                units, elastic, wanted, sequence = units.take(sound), elastic[sound], wanted[sound], sequence[sound]
        with self.stages("sample"):
            unit, position, rank = draw_positions(units, candidate_limit(units, length), elastic)
            words = measurement_words(units, unit, position)
            timed = keeps_time(units, unit, words)
        with self.stages("read"):
            picked = self.rows.pick(units.row[unit], position)
        with self.stages("fill"):
            candidates = Candidates(
                units=units, unit=unit, rank=rank, time_s=picked.time_s, timed=timed, failed=np.isnan(picked.rtt_ms)
            )
            used = np.flatnonzero(rank < fill(candidates, elastic, wanted, sequence, len(sequences), length)[unit])
        with self.stages("arrange"):
            unit = unit[used]
            arrangement = arrange(unit, words[used], picked.time_s[used], timed[used])
            chosen, unit = used[arrangement.order], unit[arrangement.order]
            return Segments(
                units=units,
                sequence=sequence,
                unit=unit,
                position=position[chosen],
                arrangement=arrangement,
                measurements=EncodableMeasurements(
                    family=units.family[unit],
                    source=self.rows.sources(units.row)[unit],
                    destination=picked.destination[chosen],
                    rtt_ms=picked.rtt_ms[chosen],
                    time_kind=arrangement.time_kind,
                    time_value=arrangement.time_value,
                    order=arrangement.field_order,
                ),
            )

    def _sound(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Which rows can be read; one that cannot is an error unless such rows are to be left out."""
        sound = np.ones(len(rows), dtype=bool)
        while True:
            try:
                self.rows.check(rows[sound])
            except CorruptRowError as error:
                if not self.skip_corrupt_rows:
                    raise
                self.corrupt_rows[error.row] = str(error)
                sound &= rows != error.row
            else:
                return sound

    def _units(self, sequences: Sequence[int]) -> tuple[Units, npt.NDArray[np.bool_], Ints, Ints]:
        """The units of these sequences, which of them are elastic, tokens planned for each, and their sequence."""
        parts = []
        for (epoch, number), places in groupby(map(self.plan.locate, sequences), key=lambda place: place[:2]):
            block = self.plan.block(epoch, number)
            for _, _, place in places:
                parts.append((block, slice(int(block.first[place]), int(block.first[place + 1]))))
        sizes = [part.stop - part.start for _, part in parts]
        columns = {
            name: np.concatenate([getattr(block.units, name)[part] for block, part in parts])
            for name in Units.__dataclass_fields__
        }
        elastic = np.concatenate([block.elastic[part] for block, part in parts])
        wanted = np.concatenate([block.wanted[part] for block, part in parts])
        return Units(**columns), elastic, wanted, np.repeat(np.arange(len(parts)), sizes)


def expand(packed: PackedTokens, sequences: int, length: int) -> Batch:
    """Lay segments side by side in the arrays of the batch contract."""
    tokens, sizes, sequence = packed.tokens, packed.sizes.astype(np.int64), packed.sequence
    used = np.bincount(sequence, sizes, sequences).astype(np.int64)
    ends = np.cumsum(used)
    inputs = np.zeros((sequences, length), dtype=np.int32)
    for row, (end, size) in enumerate(zip(ends.tolist(), used.tolist(), strict=True)):
        inputs[row, :size] = tokens[end - size : end]

    # Segment numbers and positions are running sums: of 1 at each segment's first token, and of 1 at every token but
    # the first ones, which take back what the segment before them has counted.
    column = np.cumsum(sizes) - sizes - (ends - used)[sequence]
    is_new_sequence = np.diff(sequence, prepend=-1) != 0
    steps = np.zeros((sequences, length), dtype=np.int32)
    steps[sequence, column] = 1
    segment = np.cumsum(steps, axis=1, dtype=np.int32)
    steps.fill(1)
    steps[sequence, column] = np.where(is_new_sequence, 0, 1 - np.roll(sizes, 1))
    position = np.cumsum(steps, axis=1, dtype=np.int32)
    padding = np.arange(length) >= used[:, None]
    segment[padding] = 0
    position[padding] = 0

    # A segment's last token has nothing to predict within it: that place carries no loss.
    predicts = np.zeros((sequences, length), dtype=np.int32)
    predicts[:, :-1] = (segment[:, 1:] == segment[:, :-1]) & (segment[:, :-1] > 0)
    targets = np.zeros_like(inputs)
    np.multiply(inputs[:, 1:], predicts[:, :-1], out=targets[:, :-1])
    return {
        "inputs": inputs,
        "inputs_position": position,
        "inputs_segmentation": segment,
        "targets": targets,
        "targets_position": position * predicts,
        "targets_segmentation": segment * predicts,
    }
