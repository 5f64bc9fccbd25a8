"""Measurements from Parquet files."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from ping_llm.core.errors import PingLlmError
from ping_llm.sources.files import Piece, RawBatch, find_columns
from ping_llm.storage import locate

_FETCHED_AHEAD: Final = 256 << 20
"""Of a remote file, pieces up to this size are fetched in a few large requests; longer ones block by block."""


def plan(
    path: str, size: int, renamed: Mapping[str, str], piece_rows: int, optional: frozenset[str]
) -> tuple[int, list[Piece]]:
    """Pieces of whole row groups with about `piece_rows` rows each."""
    with pq.ParquetFile(_source(path)) as file:
        metadata = file.metadata
        columns = find_columns(file.schema_arrow.names, renamed, path, optional)
        _check_types(file.schema_arrow, columns, path)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        sizes = [(group.num_rows, group.total_byte_size) for group in groups]
    pieces = []
    first_group = first_row = 0
    while first_group < len(sizes):
        last_group, rows = first_group, 0
        while last_group < len(sizes) and (rows == 0 or rows + sizes[last_group][0] <= piece_rows):
            rows += sizes[last_group][0]
            last_group += 1
        groups_bytes = sum(group_bytes for _, group_bytes in sizes[first_group:last_group])
        where: dict[str, Any] = {"row_groups": (first_group, last_group), "first_row": first_row}
        pieces.append(Piece(path=path, format="parquet", columns=columns, bytes=groups_bytes, **where))
        first_group, first_row = last_group, first_row + rows
    return metadata.num_rows, pieces


def read(piece: Piece, batch_rows: int, strict: bool) -> Iterator[RawBatch]:
    addresses = [piece.columns["src_addr"], piece.columns["dst_addr"]]
    first_row = piece.first_row
    # One thread: the caller runs several tasks side by side. Addresses come dictionary-encoded, as they are stored.
    ahead = locate(piece.path).is_remote and piece.bytes <= _FETCHED_AHEAD
    buffer = {"pre_buffer": True} if ahead else {"pre_buffer": False, "buffer_size": 1 << 20}
    with pq.ParquetFile(_source(piece.path), read_dictionary=addresses, **buffer) as file:
        groups = list(range(*piece.row_groups)) if piece.row_groups else None
        names = list(piece.columns.values())
        for batch in file.iter_batches(batch_rows, row_groups=groups, columns=names, use_threads=False):
            yield RawBatch(batch=batch.select(names).rename_columns(list(piece.columns)), first_row=first_row)
            first_row += batch.num_rows


def _source(path: str) -> Any:
    where = locate(path)
    return where.open_input() if where.is_remote else where.local


def _check_types(schema: pa.Schema, columns: Mapping[str, str], path: str) -> None:
    """Refuse a file of the wrong types before any work is done, not in the middle of it."""
    for column, name in columns.items():
        kind = schema.field(name).type
        value = kind.value_type if pa.types.is_dictionary(kind) else kind
        text = pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)
        number = pa.types.is_integer(value) or pa.types.is_floating(value) or pa.types.is_decimal(value)
        if column in {"src_addr", "dst_addr"}:
            fine, expected = text, "text"
        elif column == "event_time":
            fine = text or number or pa.types.is_timestamp(value)
            expected = "a timestamp, epoch seconds or ISO 8601 text"
        else:
            fine, expected = text or number or pa.types.is_null(value), "numbers"
        if not fine:
            raise PingLlmError(f"{path}: column {name!r} has type {kind}; expected {expected}")
