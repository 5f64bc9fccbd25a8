"""Questions as they are asked over the wire, and what is known to answer them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
from fastapi import Response

from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import MAX_TIME_US, UNPARSABLE, format_address, parse_addresses, time_microseconds
from ping_llm.core.rtt import Floats, Ints, Questions, RttDistribution
from ping_llm.rows.measurement_set import MeasurementSet, joined
from ping_llm.serve.store import Known


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One question; both addresses in their usual spelling, the time NaN for after everything."""

    source: str
    destination: str
    time_s: float = np.nan

    def __post_init__(self) -> None:
        if (":" in self.source) != (":" in self.destination):
            raise PingLlmError(
                f"{self.source} and {self.destination} are not of one family: no ping goes from one to the other"
            )


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """What an answer may be drawn from: the server's measurements, those of the request, or both."""

    known: Known | None
    history: MeasurementSet | None = None

    def __post_init__(self) -> None:
        if self.known is None or self.history is None or not len(self.known):
            return
        if self.known.is_timed and np.isnan(self.history.observations.time_s).any():
            raise PingLlmError(
                "your measurements have no times, those of the server have: add times, or use yours only"
            )

    def of_pairs(self, time_s: float) -> MeasurementSet:
        """For the completer."""
        return self._with_history([] if self.known is None else [self.known.latest_of_pairs(time_s)])

    def of_sources(self, sources: Sequence[str], time_s: float, most: int) -> MeasurementSet:
        """For the language model: at most so many of each source."""
        return self._with_history([] if self.known is None else [self.known.latest_of(sources, time_s, most)])

    def _with_history(self, parts: list[MeasurementSet]) -> MeasurementSet:
        return joined([*parts, self.history] if self.history is not None else parts)


def questions_of(asked: Iterable[Asked], nodes: Sequence[str]) -> tuple[Questions, tuple[str, ...]]:
    """Questions in numbers, and all nodes: the known ones first, as they were."""
    number = {node: place for place, node in enumerate(nodes)}
    rows = [
        (number.setdefault(one.source, len(number)), number.setdefault(one.destination, len(number)), one.time_s)
        for one in asked
    ]
    source, destination, time_s = zip(*rows, strict=True) if rows else ((), (), ())
    questions = Questions(
        source=np.array(source, dtype=np.int64),
        destination=np.array(destination, dtype=np.int64),
        time_s=np.array(time_s, dtype=np.float64),
    )
    return questions, tuple(number)


def by_time(asked: Sequence[Asked]) -> list[list[int]]:
    """Numbers of the questions of each time."""
    groups: dict[float | None, list[int]] = {}
    for number, one in enumerate(asked):
        groups.setdefault(None if np.isnan(one.time_s) else one.time_s, []).append(number)
    return list(groups.values())


def address_of(text: str) -> str:
    """An address in its usual spelling."""
    families, packed = parse_addresses([text.strip()])
    if families[0] == UNPARSABLE:
        raise PingLlmError(f"{text[:60]!r} is not an IPv4 or IPv6 address")
    return format_address(int(families[0]), packed[0].tobytes())


def seconds_of(time: Any) -> float:
    """Unix seconds of a number or of ISO 8601 text; NaN if there is no time."""
    if time is None or time == "":
        return float("nan")
    micros, missing, bad = time_microseconds(pa.array([time]))
    if missing[0] or bad[0] or not 0 <= micros[0] <= MAX_TIME_US:
        raise PingLlmError(f"{str(time)[:60]!r} is not a time between 1970 and 2100")
    return float(micros[0]) / 1e6


# Distributions and measurements as what the API replies.

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


def measured_columns(measured: MeasurementSet, rows: Ints, total: int | None = None) -> dict[str, Any]:
    """Some of the measurements, in this order."""
    chosen = measured.observations.take(rows)
    return {
        "src_addr": [measured.nodes[node] for node in chosen.source.tolist()],
        "dst_addr": [measured.nodes[node] for node in chosen.destination.tolist()],
        "event_time": chosen.time_s,
        "rtt": chosen.rtt_ms.astype(np.float32),
        "total": len(rows) if total is None else total,
    }
