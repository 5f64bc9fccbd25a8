"""Measurements that came over the wire: files of the kinds that the readers know, JSON lines, and lists of objects.

Nobody's file name is used. What a file is shows in its first bytes, and it is read from
a folder that is gone afterwards.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from ping_llm.errors import PingLlmError
from ping_llm.predict.tables import measured_of
from ping_llm.sources.observations import Measured, read_observations
from ping_llm.sources.pieces import ALIASES

_COMPRESSED: Final = (b"\x1f\x8b", b"BZh", b"(\xb5/\xfd", b"PK\x03\x04", b"\xfd7zXZ")
_EXPANSION: Final = 20
"""Bytes that a byte of Parquet may become. Measurements stay far below."""
_ATLAS_FIELDS: Final = frozenset({"prb_id", "msm_id", "fw"})


def read_upload(content: bytes, most: int) -> Measured:
    """CSV, Parquet, JSON lines or RIPE Atlas JSON."""
    start = content[:64].lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start:
        raise PingLlmError("the file is empty")
    if start.startswith(_COMPRESSED):
        raise PingLlmError("the file is compressed: unpack it first")
    if content.startswith(b"PAR1"):
        _check_parquet(content, most)
        measured = _read(content, ".parquet")
    elif start[:1] in (b"{", b"["):
        measured = _read_json(content, most)
    else:
        _check_count(content.count(b"\n"), most)
        measured = _read(content, ".csv")
    _check_count(len(measured.observations), most)
    return measured


def measured_list(measurements: Sequence[Mapping[str, Any]]) -> Measured:
    """Objects with the names of the schema or its aliases. Times are given for all or for none."""
    columns: dict[str, list[Any]] = {}
    for column, names in ALIASES.items():
        values = [next((one[name] for name in names if one.get(name) is not None), None) for one in measurements]
        if any(value is not None for value in values) or column == "rtt":
            columns[column] = values
    times = columns.get("event_time", [])
    if any(time is None for time in times):
        raise PingLlmError("some of the measurements have a time, others have not: give times for all or for none")
    if len({isinstance(time, str) for time in times}) > 1:
        columns["event_time"] = [str(time) for time in times]
    try:
        table = pa.table({name: _column(name, values) for name, values in columns.items()})
        return measured_of(table)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise PingLlmError(f"the measurements cannot be read: {' '.join(str(error).split())[:200]}") from error


def _column(name: str, values: list[Any]) -> Any:
    kind = {"rtt": pa.float64(), "src_addr": pa.string(), "dst_addr": pa.string(), "ip_version": pa.int64()}.get(name)
    if name == "event_time" and not isinstance(values[0], str):
        kind = pa.float64()
    return pa.array(values, kind)


def _read_json(content: bytes, most: int) -> Measured:
    """Atlas results, or measurements as objects: one a line, or a list of them."""
    _check_count(content.count(b"{") // 60, most)  # far more objects than that is no list of measurements
    try:
        if content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            found = orjson.loads(content)
        else:
            found = [orjson.loads(line) for line in content.splitlines() if line.strip()]
    except orjson.JSONDecodeError as error:
        raise PingLlmError(f"this is not JSON, nor one JSON object a line: {error.msg}") from error
    if not all(isinstance(one, dict) for one in found):
        raise PingLlmError("every measurement must be a JSON object")
    if not found:
        raise PingLlmError("the file holds no measurement")
    if _ATLAS_FIELDS & found[0].keys():
        return _read(content, ".json")
    _check_count(len(found), most)
    return measured_list(found)


def _check_parquet(content: bytes, most: int) -> None:
    """Before anything of it is unpacked."""
    try:
        metadata = pq.ParquetFile(pa.BufferReader(content)).metadata
        size = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    except (OSError, pa.ArrowException) as error:
        raise PingLlmError(f"this Parquet file cannot be read: {' '.join(str(error).split())[:200]}") from error
    _check_count(metadata.num_rows, most)
    if size > _EXPANSION * max(len(content), 1_000_000):
        raise PingLlmError("this Parquet file becomes too large when it is unpacked")


def _read(content: bytes, suffix: str) -> Measured:
    with tempfile.TemporaryDirectory(prefix="ping-llm-upload-") as folder:
        path = Path(folder) / f"upload{suffix}"
        path.write_bytes(content)
        try:
            return read_observations([path])
        except PingLlmError as error:
            message = str(error).replace(str(path), "the file").partition("; name yours with --columns")[0]
            raise PingLlmError(message) from error


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise TooManyError(f"{count:,} measurements are more than the {most:,} that this server takes at once")


class TooManyError(PingLlmError):
    """More than a limit allows."""
