"""Parquet: a table of any columns, read by row groups, or a matrix."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from ping_llm.core.cells import is_number
from ping_llm.sources.columns import InputOptions, are_columns, find_columns, understand
from ping_llm.sources.files import Piece, Plan, RawBatch
from ping_llm.sources.layouts import melted
from ping_llm.storage import locate

_SAMPLE_ROWS: Final = 10_000
_FETCHED_AHEAD: Final = 256 << 20
"""Of a remote file, pieces up to this size are fetched in a few large requests; longer ones block by block."""


def plan_parquet(whole: Piece, options: InputOptions, piece_rows: int, optional: frozenset[str]) -> Plan:
    """Pieces of whole row groups with about `piece_rows` rows each."""
    with pq.ParquetFile(_parquet_file(whole.path)) as file:
        metadata, names = file.metadata, list(_leaves(file.schema_arrow))
        if not are_columns(names, options.columns, optional) and (matrix := _matrix(file)) is not None:
            found = understand(matrix.column_names, _columns_of(matrix), options, whole.path, optional)
            said = f"a matrix: {found.said}"
            return None, [replace(whole, columns=found.columns, spelling=found.spelling, understood=said)]
        columns = find_columns(names, options.columns, whole.path, optional)
        chosen = list(columns.values())
        sample = next(file.iter_batches(_SAMPLE_ROWS, columns=chosen, use_threads=False), None)
        table = file.schema_arrow.empty_table() if sample is None else pa.Table.from_batches([sample])
        found = understand(names, _columns_of(table), options, whole.path, optional)
    whole = replace(whole, columns=found.columns, spelling=found.spelling, understood=found.said)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    pieces = []
    first = first_row = 0
    while first < len(groups):
        last, rows, size = first, 0, 0
        while last < len(groups) and (rows == 0 or rows + groups[last].num_rows <= piece_rows):
            rows, size, last = rows + groups[last].num_rows, size + groups[last].total_byte_size, last + 1
        pieces.append(replace(whole, bytes=size, row_groups=(first, last), first_row=first_row))
        first, first_row = last, first_row + rows
    return metadata.num_rows, pieces


_MAX_MATRIX_CELLS: Final = 25_000_000


def _matrix(file: pq.ParquetFile) -> pa.Table | None:
    """A row for each cell, if the table is a matrix: of a table of other columns, that is seen without reading it."""
    rows, columns = file.metadata.num_rows, file.metadata.num_columns
    texts = sum(not is_number(one.type) for one in file.schema_arrow)
    if texts > 3 or columns <= texts or rows > 100 * columns or rows * columns > _MAX_MATRIX_CELLS:
        return None
    return melted(file.read())


def _leaves(fields: Iterable[pa.Field], before: str = "") -> Iterator[str]:
    """Names of columns; of the fields of a struct, as `source.name`."""
    for one in fields:
        if pa.types.is_struct(one.type):
            yield from _leaves(one.type.fields, f"{before}{one.name}.")
        else:
            yield before + one.name


def _columns_of(table: pa.Table) -> dict[str, Any]:
    while any(pa.types.is_struct(one.type) for one in table.schema):
        table = table.flatten()
    return {name: table[name].combine_chunks() for name in table.column_names}


def read_parquet(piece: Piece, batch_rows: int, strict: bool) -> Iterator[RawBatch]:
    if piece.row_groups is None:  # a matrix
        with pq.ParquetFile(_parquet_file(piece.path)) as file:
            matrix = _matrix(file)
        for batch in matrix.to_batches(batch_rows) if matrix is not None else ():
            yield RawBatch(batch=batch, first_row=0)
        return
    addresses = [piece.columns["src_addr"], piece.columns["dst_addr"]]
    first_row = piece.first_row
    # One thread: the caller runs several tasks side by side. Addresses come dictionary-encoded, as they are stored.
    ahead = locate(piece.path).is_remote and piece.bytes <= _FETCHED_AHEAD
    buffer = {"pre_buffer": True} if ahead else {"pre_buffer": False, "buffer_size": 1 << 20}
    with pq.ParquetFile(_parquet_file(piece.path), read_dictionary=addresses, **buffer) as file:
        groups = list(range(*piece.row_groups))
        names = list(piece.columns.values())
        for batch in file.iter_batches(batch_rows, row_groups=groups, columns=names, use_threads=False):
            if any(name not in batch.schema.names for name in names):
                batch = pa.record_batch(_columns_of(pa.Table.from_batches([batch])))
            yield RawBatch(batch=batch.select(names).rename_columns(list(piece.columns)), first_row=first_row)
            first_row += batch.num_rows


def _parquet_file(path: str) -> Any:
    where = locate(path)
    return where.open_random() if where.is_remote else where.local
