"""Measurements as JSON objects: one per line, or one array of them. Their fields are columns."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import orjson
import pyarrow as pa

from ping_llm.core.errors import MeasurementError, PingLlmError
from ping_llm.sources.atlas.chunks import read_chunks
from ping_llm.sources.columns import InputOptions, understand
from ping_llm.sources.files import Piece, Plan, RawBatch

_START: Final = re.compile(rb'^(?:\xef\xbb\xbf)?\s*\[?\s*\{\s*(?:"|\})|^(?:\xef\xbb\xbf)?\s*\[\s*\]')
_SAMPLE_OBJECTS: Final = 1_000


def is_objects(start: bytes) -> bool:
    return _START.match(start) is not None


def plan_objects(whole: Piece, options: InputOptions, piece_rows: int, optional: frozenset[str]) -> Plan:
    lines = (one for _, one in _objects(whole.path) if isinstance(one, dict))
    sample = list(islice(lines, _SAMPLE_OBJECTS))
    if not sample:
        raise PingLlmError(f"{whole.path}: holds no JSON object")
    names = list(dict.fromkeys(name for one in sample for name in one))
    found = understand(names, {name: column_of(sample, name) for name in names}, options, whole.path, optional)
    return None, [
        replace(whole, columns=found.columns, spelling=found.spelling, understood=f"JSON objects: {found.said}")
    ]


def read_objects(piece: Piece, batch_rows: int, strict: bool) -> Iterator[RawBatch]:
    first_row, objects, bad = 0, list[dict[str, Any]](), list[int]()

    def batch() -> RawBatch:
        columns = {column: column_of(objects, name) for column, name in piece.columns.items()}
        examples = {"malformed_row": f"line {bad[0]}: no JSON object"} if bad else {}
        dropped = Counter(malformed_row=len(bad))
        return RawBatch(batch=pa.record_batch(columns), first_row=first_row, dropped=dropped, examples=examples)

    for number, one in _objects(piece.path):
        if isinstance(one, dict):
            objects.append(one)
        elif strict:
            raise MeasurementError(f"{piece.path}, line {number}: malformed_row (no JSON object)")
        else:
            bad.append(number)
        if len(objects) >= batch_rows:
            yield batch()
            first_row, objects, bad = first_row + len(objects) + len(bad), [], []
    yield batch()


def _objects(path: str) -> Iterator[tuple[int, Any]]:
    """What each line or element holds (None: no JSON), with its number."""
    for chunk in read_chunks(path):
        for number, line in enumerate(chunk.data.split(b"\n"), chunk.first):
            if line.strip():
                try:
                    yield number, orjson.loads(line)
                except orjson.JSONDecodeError:
                    yield number, None


def column_of(objects: Sequence[Any], name: str) -> Any:
    """A field of all objects: numbers if they all are, else text."""
    values = [one.get(name) for one in objects]
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float}:
        try:
            return pa.array(values, pa.int64() if kinds == {int} else pa.float64())
        except (pa.ArrowException, OverflowError):
            pass
    return pa.array([value if value is None or isinstance(value, str) else str(value) for value in values], pa.string())
