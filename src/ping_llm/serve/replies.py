"""Distributions and measurements as what the API replies."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import orjson
from fastapi import Response

from ping_llm.baselines.interface import Floats, Ints
from ping_llm.distribution import RttDistribution
from ping_llm.sources.observations import Measured

_OUTERMOST: Final = (0.01, 0.99)
"""Quantiles between which densities are given."""
_LEAST_RANGE: Final = 1.2
"""Between the outermost edges, as a factor: even of an answer that is certain, something is to be seen."""


def json_reply(content: Any, status: int = 200) -> Response:
    """NaN becomes null."""
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json")


def predictions(
    answers: RttDistribution, levels: Sequence[float], bins: int, *, one_range: bool = False
) -> list[dict[str, Any]]:
    """One object for each question; `one_range`: with the same bins for all."""
    quantiles = answers.quantile(list(levels)) if levels else np.zeros((len(answers), 0))
    columns = zip(answers.p_failed.tolist(), answers.median.tolist(), quantiles, strict=True)
    found = [
        {
            "p_failed": p_failed,
            "median": median,
            "quantiles": {f"{level:g}": value for level, value in zip(levels, own.tolist(), strict=True)},
        }
        for p_failed, median, own in columns
    ]
    if bins:
        edges = _edges(answers, bins, one_range=one_range)
        shares = np.maximum(np.diff(answers.cdf(edges), axis=1), 0.0)
        for reply, own_edges, own in zip(found, edges, shares, strict=True):
            reply["density"] = {"edges": own_edges.astype(np.float32), "probability": own.astype(np.float32)}
    return found


def _edges(answers: RttDistribution, bins: int, *, one_range: bool) -> Floats:
    low, high = answers.quantile(list(_OUTERMOST)).T
    if one_range:
        low, high = np.full_like(low, low.min()), np.full_like(high, high.max())
    middle, reach = np.sqrt(low * high), np.sqrt(np.maximum(high / low, _LEAST_RANGE))
    return np.geomspace(middle / reach, middle * reach, bins + 1, axis=1)


def measured_columns(measured: Measured, rows: Ints, total: int | None = None) -> dict[str, Any]:
    """Some of the measurements, in this order."""
    chosen = measured.observations.take(rows)
    return {
        "src_addr": [measured.nodes[node] for node in chosen.source.tolist()],
        "dst_addr": [measured.nodes[node] for node in chosen.destination.tolist()],
        "event_time": chosen.time_s,
        "rtt": chosen.rtt_ms.astype(np.float32),
        "total": len(rows) if total is None else total,
    }
