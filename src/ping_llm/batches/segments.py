"""The contexts of some sequences: chosen from the rows, fitted to the sequences and written as tokens.

Importing this loads (or compiles) the kernels.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ping_llm.batches.batch import PackedTokens, Stages
from ping_llm.batches.contexts import Mode, Units
from ping_llm.batches.kernels.sampling import SOUND, fill, sample
from ping_llm.batches.kernels.writing import write
from ping_llm.batches.plan import PlannedUnits
from ping_llm.core.randomness import Ints
from ping_llm.rows.reader import RowReader

_NO_TIMES: Final = int(Mode.NONE)


@dataclass(frozen=True, kw_only=True)
class Segments:
    """What was chosen, its tokens, and what `inspect batch` explains."""

    units: Units
    counts: Ints
    """Measurements of each unit that are used."""
    position: Ints
    """Of each measurement, in the order in which it is written: its position in the unit's row."""
    field_order: npt.NDArray[np.uint8]
    packed: PackedTokens

    @property
    def unit(self) -> Ints:
        """The unit of each measurement."""
        return np.repeat(np.arange(len(self.units)), self.counts)


def write_segments(planned: PlannedUnits, reader: RowReader, length: int, stages: Stages) -> Segments:
    """Segments of at most `length` tokens in each sequence. Rows that are damaged are an error."""
    units = planned.units
    with stages("read"):
        reader.check(units.row)
    with stages("sample"):
        first, position, rank, words, timed = sample(
            units.key, units.family, units.mode, units.start, units.size, planned.elastic, length
        )
    with stages("read"):
        picked = reader.pick(units.row, first, position, units.mode != _NO_TIMES)
    with stages("fill"):
        counts, sizes = np.empty(len(units), dtype=np.int64), np.empty(len(units), dtype=np.int32)
        fault = fill(
            planned.sequence,
            units.family,
            units.mode,
            units.most,
            planned.elastic,
            planned.wanted,
            length,
            first,
            rank,
            picked.time_s,
            timed,
            picked.rtt_ms,
            counts,
            sizes,
        )
        if fault != SOUND:
            raise reader.rows.corrupt(int(units.row[fault]), "its measurements are not as the index says")
    with stages("encode"):
        tokens, written, field_order = write(
            units.family,
            units.mode,
            reader.sources(units.row),
            counts,
            sizes,
            first,
            position,
            rank,
            words,
            timed,
            picked.time_s,
            picked.rtt_ms,
            picked.destination,
        )
    packed = PackedTokens(tokens=tokens, sizes=sizes, sequence=planned.sequence)
    return Segments(units=units, counts=counts, position=written, field_order=field_order, packed=packed)
