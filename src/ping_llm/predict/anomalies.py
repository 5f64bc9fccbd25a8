"""Measurements beside what was expected of them, and how they went over time.

    bits       negative log-likelihood (NLL) of the result: 10 bits more are a thousand times less likely
    tail       probability of a result at least as far from the median on its side, doubled; of a timeout: of one
    expected   the median, given an answer; `low` and `high` are the ends of the 90 % interval
    p_failed   the probability of a timeout

All are given what was measured strictly before.
"""

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from ping_llm.core.console import Advance, no_progress
from ping_llm.core.errors import PingLlmError
from ping_llm.core.rtt import Floats, Ints, RttDistribution
from ping_llm.models.completer.inference import Completer
from ping_llm.predict.support import Support
from ping_llm.rows.measurement_set import MeasurementSet

if TYPE_CHECKING:
    from ping_llm.predict.predictor import Predictor

_EXPECTED: Final = ("expected", "low", "high", "p_failed", "tail", "bits")
_STEPS_S: Final = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 86_400, 7 * 86_400)
_SLOTS: Final = 24
_LEAST: Final = 1e-12
"""Tail probability of what a distribution holds to be impossible."""


def anomalies(
    predictor: "Predictor", measured: MeasurementSet, which: Ints, top: int, advance: Advance = no_progress
) -> pa.Table:
    """Some measurements, in time order. A language model scores all, and says what it expected of the `top` highest."""
    known = measured.observations
    asked = known.take(which)
    found = {name: np.full(len(which), np.nan) for name in _EXPECTED}
    explained = np.arange(len(which))
    if isinstance(predictor.model, Completer):
        if np.isnan(asked.time_s).any():
            raise PingLlmError("anomalies need times: a measurement is compared with what was measured before it")
    else:
        found["bits"] = predictor.anomaly_scores(measured, which, advance)
        explained, advance = np.sort(highest(found["bits"], top)), no_progress
    questions = asked.questions.take(explained)
    support = Support.of(known, questions, measured.addresses_of())
    for rows, answers in predictor.in_parts(known, questions, measured.addresses_of(), support, advance):
        at = explained[rows]
        low, high = answers.interval(0.9)
        columns = {"expected": answers.median, "low": low, "high": high, "p_failed": answers.p_failed}
        columns["tail"] = _tail(answers, asked.rtt_ms[at])
        if isinstance(predictor.model, Completer):
            columns["bits"] = answers.bits(asked.rtt_ms[at])
        for name, column in columns.items():
            found[name][at] = column
    time_us = pa.array((asked.time_s * 1e6).round(), from_pandas=True).cast(pa.int64())
    ends = ([measured.nodes[node] for node in end.tolist()] for end in (asked.source, asked.destination))
    table = pa.table([time_us.cast(pa.timestamp("us", tz="UTC")), *ends], ["event_time", "src_addr", "dst_addr"])
    for name, column in {"rtt": asked.rtt_ms, **found}.items():
        table = table.append_column(name, pa.array(column, from_pandas=True))
    return table


def highest(scores: Floats, count: int) -> Ints:
    """Rows of the highest scores, highest first."""
    return np.argsort(-np.nan_to_num(scores), kind="stable")[:count]


def _tail(answers: RttDistribution, rtt_ms: Any) -> Floats:
    below = answers.cdf(np.where(np.isnan(rtt_ms), 1.0, rtt_ms))
    answered = (1 - answers.p_failed) * 2 * np.minimum(below, 1 - below)
    return np.maximum(np.where(np.isnan(rtt_ms), answers.p_failed, answered), _LEAST)


def timeline(scored: pa.Table, scores: Floats) -> pa.Table:
    """The same in some two dozen slots of time: `from`, and of the measurements from then on until the next one
    their count, timeouts, expected timeouts, and the mean and the highest of their scores."""
    if scored["event_time"].null_count:
        raise PingLlmError("a timeline needs times, and the measurements have none")
    time_s = scored["event_time"].cast(pa.int64()).to_numpy() / 1e6
    span = float(np.ptp(time_s)) if len(time_s) else 0.0
    step = next((step for step in _STEPS_S if span < (_SLOTS - 1) * step), span / (_SLOTS - 1))
    slots, at = np.unique(time_s // step, return_inverse=True)
    count, failed = np.bincount(at), np.isnan(scored["rtt"].to_numpy())
    most = np.zeros(len(slots))
    np.maximum.at(most, at, scores)
    columns = {
        "from": pa.array((slots * step * 1e6).astype(np.int64)).cast(pa.timestamp("us", tz="UTC")),
        "measurements": count,
        "timeouts": np.bincount(at, failed).astype(np.int64),
        "expected_timeouts": pa.array(np.bincount(at, scored["p_failed"].to_numpy()), from_pandas=True),
        "mean_score": np.bincount(at, scores) / count,
        "highest_score": most,
    }
    return pa.table(columns)
