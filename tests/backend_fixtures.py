"""Helpers of the text backends' tests: small files of every format, and a tokenizer whose tokens are bytes."""

import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python.array_record_module import ArrayRecordWriter

from ping_llm.batches.batch import digest
from ping_llm.batches.spec import Batch, DataState, TrainLoader
from ping_llm.config import Config
from ping_llm.config.keys import RANDOM_ACCESS_TYPES
from ping_llm.data.registry import make_train_loader
from ping_llm.training.state import data_state

BOS, EOS = 256, 257
"""Of `byte_tokenizer`."""


def texts(count: int, *, seed: int = 0, mean: int = 60) -> list[str]:
    """Documents that begin with their number, of very different sizes."""
    rng = np.random.default_rng(seed)
    sizes = np.minimum(rng.lognormal(np.log(mean), 1.0, count).astype(int), 20 * mean)
    letters = "abcdefghij klmno pqrst uvwxyz "
    words = ["".join(letters[c] for c in rng.integers(0, len(letters), size)) for size in sizes.tolist()]
    return [f"<{seed}:{i}>{text}" for i, text in enumerate(words)]


def byte_tokenizer(folder: Path) -> Path:
    """A tiktoken file without any merge: 256 bytes, and 256 special tokens behind them."""
    path = folder / "bytes.tiktoken"
    path.write_text("".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)))
    return path


def example(**features: bytes | list[int]) -> bytes:
    """A `tf.train.Example`."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            feature = _field(1, _field(1, value))
        else:
            feature = _field(3, _field(1, b"".join(map(_varint, value))))
        entries += _field(1, _field(1, name.encode()) + _field(2, feature))
    return _field(1, entries)


def _field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def write_arrayrecord(path: Path, documents: Sequence[str]) -> None:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for text in documents:
        writer.write(example(url=b"http://example.org", text=text.encode()))
    writer.close()


def write_tfrecord(path: Path, records: Sequence[bytes]) -> None:
    """Without checksums, which are not looked at."""
    path.write_bytes(b"".join(len(r).to_bytes(8, "little") + b"sum1" + r + b"sum2" for r in records))


def write(path: Path, documents: Sequence[str]) -> None:
    """In the format that the name says."""
    if path.suffix == ".arrayrecord":
        write_arrayrecord(path, documents)
    elif path.suffix == ".tfrecord":
        write_tfrecord(path, [example(text=text.encode()) for text in documents])
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"text": pa.array(list(documents), pa.string())}), path, row_group_size=7)
    else:
        path.write_text("".join(f'{{"text": "{text}"}}\n' for text in documents))


def write_files(folder: Path, kind: str, files: Sequence[Sequence[str]]) -> str:
    """The pattern of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, documents in enumerate(files):
        write(folder / f"part-{number:03d}.{kind}", documents)
    return str(folder / f"*.{kind}")


def text_config(folder: Path, **changes: Any) -> Config:
    """Small sequences of bytes, made in this process."""
    values: dict[str, Any] = {
        "dataset_type": "grain",
        "tokenizer_type": "tiktoken",
        "tokenizer_path": str(byte_tokenizer(folder)),
        "per_device_batch_size": 8,
        "max_target_length": 128,
        "max_segments_per_seq": 64,
        "grain_worker_count": 0,
        "shuffle_window": 16,
        "data_cache_dir": str(folder / "cache"),
    }
    if (values | changes).get("grain_file_type", "arrayrecord") in RANDOM_ACCESS_TYPES:
        del values["max_segments_per_seq"]
    return Config(**values | changes)


def reading(kind: str, pattern: str) -> dict[str, Any]:
    """The keys that read files of a kind in order."""
    if kind == "hf":
        return {"dataset_type": "hf", "hf_path": "json", "hf_train_files": pattern}
    return {"grain_file_type": kind, "grain_train_files": pattern}


def take(
    config: Config,
    count: int,
    state: DataState | None = None,
    open_loader: Callable[..., TrainLoader] = make_train_loader,
    **where: int,
) -> list[Batch]:
    with open_loader(config, state=state, **where) as loader:
        return [next(loader) for _ in range(count)]


def digests(batches: Sequence[Batch]) -> list[str]:
    return [digest(batch) for batch in batches]


def state_after(config: Config, steps: int, open_loader: Callable[..., TrainLoader] = make_train_loader) -> DataState:
    """What a run stores after so many steps, while the loader has made three batches more; through its text."""
    with open_loader(config) as loader:
        begun = loader.state()
        for _ in range(steps + 3):
            next(loader)
        return DataState.from_json(data_state(loader, begun, steps).to_json())


def documents_of(batches: Sequence[Batch]) -> list[str]:
    """The numbers of the documents that begin in these batches, but of those that are cut within their number."""
    found = []
    for batch in batches:
        for row, segments in zip(batch["inputs"], batch["inputs_segmentation"], strict=True):
            for segment in range(1, int(segments.max(initial=0)) + 1):
                tokens = row[segments == segment]
                name, end, _ = bytes(tokens[tokens < 256].astype(np.uint8)).decode().partition(">")
                if tokens[0] == BOS and end:
                    found.append(name)
    return found


def together(parts: Sequence[Sequence[Batch]]) -> list[Batch]:
    """Global batches from those of each host."""
    return [
        {name: np.concatenate([part[name] for part in step]) for name in step[0]} for step in zip(*parts, strict=True)
    ]


def text_of(batches: Sequence[Batch]) -> str:
    """All that is in some batches, in its order."""
    tokens = np.concatenate([batch["inputs"][batch["inputs_segmentation"] > 0] for batch in batches])
    return bytes(tokens[tokens < 256].astype(np.uint8)).decode()


def texts_in(batches: Sequence[Batch]) -> list[str]:
    """The documents in some batches, in their order; those of `texts` begin with `<`."""
    return ["<" + part for part in text_of(batches).split("<")[1:]]
