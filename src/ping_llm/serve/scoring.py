"""Surprise of measurements that came over the wire, a piece at a time, latest first, as far as the time goes."""

import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ping_llm.baselines.interface import Floats, Ints
from ping_llm.completer import Completer
from ping_llm.predict.histories import Histories
from ping_llm.predict.surprise import surprise
from ping_llm.rows.format import ProbeRow
from ping_llm.serve.answers import Answers
from ping_llm.serve.model_thread import Job
from ping_llm.sources.observations import Measured

_SCORED_AT_ONCE: Final = 256


@dataclass(frozen=True, kw_only=True)
class Scored:
    which: Ints
    bits: Floats
    in_time: bool
    """Whether all that were wanted have been scored."""


def score(answers: Answers, measured: Measured, most: int, seconds: float) -> Job:
    """Of the latest measurements: so many, or as many as there is time for."""
    end = time.monotonic() + seconds
    which = np.arange(len(measured.observations))[-most:]
    scored, bits = [], []
    pieces = completed_bits(answers, measured, which) if answers.is_completer else _read_bits(answers, measured, which)
    for part, of_part in pieces:
        scored.append(part)
        bits.append(of_part)
        yield None
        if time.monotonic() > end:
            break
    done = np.concatenate(scored)
    order = np.argsort(done)
    return Scored(which=done[order], bits=np.concatenate(bits)[order], in_time=len(done) == len(which))


def completed_bits(answers: Answers, measured: Measured, which: Ints) -> Generator[tuple[Ints, Floats], None, None]:
    assert isinstance(answers.model, Completer)
    known = measured.observations
    for place in which[::-1].tolist():
        one = np.array([place])
        found = answers.model.predict(known, known.questions.take(one), measured.nodes)
        yield one, found.bits(known.rtt_ms[one])


def _read_bits(answers: Answers, measured: Measured, which: Ints) -> Generator[tuple[Ints, Floats], None, None]:
    """Of a source at a time, in pieces before which stands as much as a context can hold."""
    known = measured.observations
    histories, timed = Histories(known, measured.nodes), not np.isnan(known.time_s).any()
    for source in np.unique(known.source[which]).tolist():
        row, places = histories.row(source)
        first = int(np.searchsorted(places, which[0]))
        for stop in range(len(places), first, -_SCORED_AT_ONCE):
            start = max(first, stop - _SCORED_AT_ONCE)
            piece = _piece(row, max(0, start - answers.looks_at), stop)
            bits = surprise(answers.predictor.language_model, piece, timed=timed).result
            yield places[start:stop], bits[start - stop :]


def _piece(row: ProbeRow, start: int, stop: int) -> ProbeRow:
    return replace(
        row,
        destinations=row.destinations[start:stop],
        time_us=row.time_us[start:stop],
        rtt_ms=row.rtt_ms[start:stop],
    )
