"""A split as a folder, so that others can train on the same part and be asked the same questions.

train/measurements.parquet      measurements, as every other command reads them
history.parquet                 likewise
questions-PROTOCOL.parquet      likewise, the answers included
nodes.parquet                   the address of each node, in the order of their numbers
split.json                      the rule, the settings, the cut time and how many measurements went where
"""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ping_llm.core.errors import PingLlmError
from ping_llm.core.files import atomic_folder
from ping_llm.core.measurements import SCHEMA, parse_addresses
from ping_llm.core.rtt import Ints, Observations
from ping_llm.evaluate.split import PROTOCOLS, RULE, Split, SplitSettings, split
from ping_llm.rows.measurement_set import MeasurementSet
from ping_llm.sources import SPLIT_FILE

FORMAT_VERSION: Final = 1
TRAIN_FILE: Final = "train/measurements.parquet"

_ROWS_PER_GROUP: Final = 1 << 17


def write_split(
    measured: MeasurementSet, folder: Path, settings: SplitSettings | None = None, *, overwrite: bool = False
) -> Split:
    """Split the measurements and write the folder, whole or not at all."""
    settings = settings or SplitSettings()
    if folder.exists() and not overwrite:
        raise PingLlmError(f"{folder} already exists: choose another folder, or overwrite it")
    if folder.exists() and not (folder / SPLIT_FILE).exists():
        raise PingLlmError(f"{folder} holds something else than a split and is not overwritten; choose another folder")
    result = split(measured, settings)
    families, _ = parse_addresses(result.nodes)
    ip_version, addresses = pa.array(families.astype(np.int8)), pa.array(result.nodes, pa.string())
    parts = {TRAIN_FILE: result.train, "history.parquet": result.history}
    parts |= {f"questions-{name}.parquet": questions for name, questions in result.questions.items()}
    try:
        with atomic_folder(folder) as unfinished:
            pq.write_table(pa.table({"address": addresses}), unfinished / "nodes.parquet", compression="zstd")
            for name, part in parts.items():
                (unfinished / name).parent.mkdir(exist_ok=True)
                _write(unfinished / name, part, addresses, ip_version)
            (unfinished / SPLIT_FILE).write_text(json.dumps(_description(result, settings), indent=2) + "\n")
    except OSError as error:
        raise PingLlmError(f"cannot write {folder}: {error.strerror or error}") from error
    return result


def _description(result: Split, settings: SplitSettings) -> dict[str, Any]:
    questions = {name: len(part) for name, part in result.questions.items()}
    cut = None if result.timeless else result.cut_time_s
    return {
        "format": FORMAT_VERSION,
        "rule": RULE,
        "settings": asdict(settings),
        "cut_time_s": cut,
        "cut_time": None if cut is None else datetime.fromtimestamp(cut, UTC).isoformat(),
        "train": len(result.train),
        "history": len(result.history),
        "questions": questions,
        "unused": result.unused,
    }


def _write(path: Path, part: Observations, addresses: Any, ip_version: Any) -> None:
    time, rtt = _time_column(part), _rtt_column(part)
    schema = SCHEMA.set(0, pa.field("event_time", time.type, nullable=time.null_count > 0)).set(
        4, pa.field("rtt", rtt.type)
    )
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=["src_addr", "dst_addr"]) as file:
        for start in range(0, max(1, len(part)), _ROWS_PER_GROUP):
            rows = slice(start, start + _ROWS_PER_GROUP)
            source, destination = part.source[rows], part.destination[rows]
            columns = [time[rows], addresses.take(source), addresses.take(destination), ip_version.take(source)]
            file.write_table(pa.table([*columns, rtt[rows]], schema=schema))


def _time_column(part: Observations) -> Any:
    """Microseconds, as the schema has them; seconds, which readers take too, if times are finer or out of range."""
    with np.errstate(invalid="ignore"):
        time_us = np.rint(part.time_s * 1e6)
        lossless = np.isnan(part.time_s) | ((time_us / 1e6 == part.time_s) & (np.abs(time_us) < 2**62))
    if not lossless.all():
        return pa.array(part.time_s)
    return pa.array(time_us, from_pandas=True).cast(pa.int64()).cast(SCHEMA.field("event_time").type)


def _rtt_column(part: Observations) -> Any:
    exact = part.rtt_ms if part.rtt_ms.dtype == np.float32 else part.rtt_ms.astype(np.float64)
    return pa.array(exact, from_pandas=True)


def read_split(folder: Path) -> Split:
    """The split that `write_split` wrote, exactly."""
    try:
        description = json.loads((folder / SPLIT_FILE).read_text())
        if description["format"] != FORMAT_VERSION:
            raise PingLlmError(
                f"{folder} has format {description['format']}; this version of ping-llm reads {FORMAT_VERSION}"
            )
        nodes = pq.read_table(folder / "nodes.parquet")["address"].combine_chunks()
        asked = [name for name in PROTOCOLS if name in description["questions"]]
        cut = description["cut_time_s"]
        return Split(
            nodes=tuple(nodes.to_pylist()),
            cut_time_s=float("nan") if cut is None else cut,
            train=_read(folder / TRAIN_FILE, nodes),
            history=_read(folder / "history.parquet", nodes),
            questions={name: _read(folder / f"questions-{name}.parquet", nodes) for name in asked},
            unused=description["unused"],
        )
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise PingLlmError(f"{folder} is not a split, or is damaged: {' '.join(str(error).split())[:200]}") from error


def _read(path: Path, nodes: Any) -> Observations:
    table = pq.read_table(path, read_dictionary=["src_addr", "dst_addr"]).unify_dictionaries()
    time = table["event_time"]
    in_us = pa.types.is_timestamp(time.type)
    return Observations(
        source=_ids(table["src_addr"], nodes),
        destination=_ids(table["dst_addr"], nodes),
        time_s=time.cast(pa.int64()).to_numpy() / 1e6 if in_us else time.to_numpy(),
        rtt_ms=table["rtt"].to_numpy(),
    )


def _ids(column: Any, nodes: Any) -> Ints:
    """The number of the node of each address. All chunks of the column have the same dictionary."""
    if not len(column):
        return np.zeros(0, dtype=np.int64)
    ids = pc.index_in(column.chunk(0).dictionary, value_set=nodes).to_numpy(zero_copy_only=False)
    return np.concatenate([ids[chunk.indices.to_numpy()] for chunk in column.chunks], dtype=np.int64)
