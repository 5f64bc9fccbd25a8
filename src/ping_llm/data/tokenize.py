"""`ping-llm tokenize`: documents become token files, from which batches are made without a tokenizer."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from ping_llm.batches.documents import DocumentsSpec, TokenDocuments, write_token_file
from ping_llm.config import Config
from ping_llm.core.console import Advance, no_progress
from ping_llm.core.errors import PingLlmError
from ping_llm.core.files import sole_writer, write_atomically
from ping_llm.data.documents import EpochStream, in_order, int_feature, text_feature
from ping_llm.data.grain import train_files
from ping_llm.data.tokenizer import tokenization, tokenizer_of
from ping_llm.tasks.pool import available_cores, map_in_order, worker_pool

SETTINGS: Final = "tokenized.json"
_WINDOW: Final = 1024


@dataclass(frozen=True, kw_only=True)
class _Task:
    config: Config
    file: Path
    output: Path
    copies: bool


def tokenize(
    config: Config,
    output: Path,
    *,
    copies: bool = False,
    workers: int | None = None,
    on_progress: Advance = no_progress,
) -> dict[str, Any]:
    """A token file for each training file, side by side; those that are there already stay.

    With `copies`, the column holds tokens instead of text.
    """
    files = [file for files in train_files(config) for file in files]
    tasks = [_Task(config=config, file=f, output=output / f"{f.name}.bin", copies=copies) for f in files]
    if len({task.output for task in tasks}) < len(tasks):
        raise PingLlmError("two of the files have the same name: tokenize them into folders of their own")
    settings = json.dumps(_settings(config, copies=copies), indent=1)
    with sole_writer(output):
        if (said := output / SETTINGS).exists() and said.read_text() != settings:
            raise PingLlmError(f"{output} holds documents tokenized otherwise ({SETTINGS}): use another folder")
        write_atomically(said, settings)
        on_progress(0, total=len(tasks))
        with worker_pool(min(workers or available_cores(), len(tasks))) as pool:
            for _ in map_in_order(pool, _tokenized, tasks, window=2 * len(tasks)):
                on_progress()
    documents = TokenDocuments([task.output for task in tasks])
    return {
        "output": str(output),
        "files": len(tasks),
        "documents": len(documents.lengths),
        "tokens": int(documents.lengths.sum(dtype=np.int64)),
        "fingerprint": DocumentsSpec.of([task.output for task in tasks]).fingerprint,
    }


def _settings(config: Config, *, copies: bool) -> dict[str, Any]:
    if copies:
        return {"column": config.train_data_columns, "vocab_size": config.vocab_size}
    return {"column": config.train_data_columns, **tokenization(config)}


def _tokenized(task: _Task) -> None:
    if task.output.exists() and task.output.with_suffix(".idx").exists():
        return
    config, feature = task.config, int_feature if task.copies else text_feature
    documents = in_order([task.file], config.grain_file_type, config.train_data_columns, feature)
    if task.copies:
        if not config.vocab_size:
            raise PingLlmError("set vocab_size: how many tokens there are decides how many bytes each takes")
        write_token_file(task.output, iter(documents.read, None), config.vocab_size)
    else:
        write_token_file(task.output, _encoded(config, documents), tokenizer_of(config).vocabulary)


def _encoded(config: Config, documents: EpochStream) -> Iterator[Any]:
    encode = tokenizer_of(config).encode
    while texts := list(islice(iter(documents.read, None), _WINDOW)):
        tokens, sizes = encode(texts)
        yield from np.split(tokens, np.cumsum(sizes)[:-1])
