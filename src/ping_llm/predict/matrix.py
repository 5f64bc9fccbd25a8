"""Answers as a matrix: a row for each source, a column for each destination, measured values beside predicted ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ping_llm.core.rtt import Bools, Floats
from ping_llm.sources.columns import question_columns

MARKS: Final = {"measured": "", "predicted": "~", "extrapolated": "?"}
"""What stands after a value. Whoever wants the number only can drop the last character."""
RAMP: Final = ("#30123b", "#4664d7", "#36a9f9", "#1ae4b6", "#72fe5e", "#c8ef34", "#faba39", "#f66b19", "#ca2a04")
"""Colours of RTTs, short ones first (Turbo, without its darkest red). The scale is logarithmic."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Matrix:
    """All arrays are [sources, destinations]; NaN where nothing was asked, as of a node to itself."""

    sources: tuple[str, ...]
    destinations: tuple[str, ...]
    measured: Floats
    """NaN, too, where nothing was measured."""
    predicted: Floats
    low: Floats
    high: Floats
    """Of the predicted interval."""
    p_failed: Floats
    extrapolating: Bools

    @classmethod
    def of(cls, answered: pa.Table, levels: Sequence[float], nodes: Sequence[str]) -> Self:
        """From the table of `Predictor.answered`, the levels that it has quantiles of, and all nodes in order."""
        columns = question_columns(answered.column_names)
        ends = [answered[columns[end]] for end in ("src_addr", "dst_addr")]
        occurring = [set(end.unique().to_pylist()) for end in ends]
        names = [tuple(node for node in nodes if node in those) for those in occurring]
        at = tuple(pc.index_in(end, pa.array(own)).to_numpy() for end, own in zip(ends, names, strict=True))

        def spread(name: str) -> Floats:
            values = np.full([len(nodes) for nodes in names], np.nan)
            values[at] = answered[name].to_numpy()
            return values

        low, high = (spread(f"{level:g}") for level in (min(levels), max(levels)))
        return cls(
            sources=names[0],
            destinations=names[1],
            measured=spread("measured"),
            predicted=spread("predictions"),
            low=low,
            high=high,
            p_failed=spread("p_failed"),
            extrapolating=spread("extrapolating") == 1,
        )

    @property
    def values(self) -> Floats:
        """What is known best: measured or, where nothing was, predicted."""
        return np.where(np.isnan(self.measured), self.predicted, self.measured)

    @property
    def kinds(self) -> npt.NDArray[np.str_]:
        """Of each value, a key of `MARKS`."""
        guess = np.where(self.extrapolating, "extrapolated", "predicted")
        return np.where(np.isnan(self.measured), guess, "measured")

    @property
    def scale(self) -> tuple[float, float]:
        """RTTs of the first and the last colour: a few extreme ones do not decide them."""
        known = self.values[~np.isnan(self.values)]
        low, high = np.quantile(np.maximum(known, 0.01), [0.02, 0.98]) if len(known) else (1.0, 1.0)
        return float(low), float(max(high, 1.01 * low))

    def colours(self) -> npt.NDArray[np.float64]:
        """Where on the ramp each value is, from 0 to 1; NaN where there is none."""
        low, high = self.scale
        return np.clip(np.log(np.maximum(self.values, 0.01) / low) / np.log(high / low), 0.0, 1.0)
