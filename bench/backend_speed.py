"""Speed of every backend on the same documents: `python bench/backend_speed.py --data ../shared/data/c4-minimal`.

Beside each stands the usual way, measured right before it: one document at a time through the same tokenizer, then
packed. Backends whose packages are not installed are left out, and named. Rates per core are by the time that the
process really had, so that other work on the machine hardly matters.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ping_llm.config import Config
from ping_llm.core.console import progress
from ping_llm.core.errors import PingLlmError
from ping_llm.data.documents import Documents, matching
from ping_llm.data.registry import make_train_loader
from ping_llm.data.tokenizer import load_tokenizer

_NEEDS: Final = {"hf": "datasets", "tfds": "tensorflow_datasets", "c4_mlperf": "tensorflow_datasets"}
_WARM_UP: Final = 4
_COPIES: Final = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/c4-minimal"), help="a sample of C4")
    parser.add_argument("--only", nargs="*", default=(), help="backends to measure")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each")
    sys.stdout.write(json.dumps(measure_backends(**vars(parser.parse_args())), indent=1) + "\n")


def measure_backends(
    data: Path,
    *,
    workers: int = 0,
    batch_size: int = 64,
    length: int = 1024,
    seconds: float = 5.0,
    only: Collection[str] = (),
) -> dict[str, Any]:
    """`data` is laid out as the C4 sample: `c4/en/3.0.1` and `tokenizer.default.model`."""
    tokenizer = data / "tokenizer.default.model"
    if not tokenizer.exists():
        raise PingLlmError(f"{data} is not laid out as the C4 sample: there is no {tokenizer}")
    records = f"{data}/c4/en/3.0.1/c4-train.array_record*"
    documents = Documents(matching(records, "--data", "arrayrecord"), "text")
    texts = documents.texts(np.arange(len(documents)))
    text = Config(
        dataset_type="grain",
        tokenizer_path=str(tokenizer),
        grain_train_files=records,
        per_device_batch_size=float(batch_size),
        max_target_length=length,
        grain_worker_count=workers,
        shuffle_window=512,
    )
    found: dict[str, Any] = {}
    references = []
    with tempfile.TemporaryDirectory(prefix="ping-llm-bench-", ignore_cleanup_errors=True) as scratch:
        configs = _configs(text, data, Path(scratch), texts)
        if unknown := set(only) - set(configs):
            raise PingLlmError(f"there is no backend {', '.join(sorted(unknown))}, only {', '.join(configs)}")
        chosen = {name: config for name, config in configs.items() if not only or name in only}
        with progress("measuring", total=len(chosen)) as advance:
            for name, config in chosen.items():
                package = _NEEDS.get(name)
                if package and importlib.util.find_spec(package) is None:
                    found[name] = {"skipped": f"the package {package} is not installed"}
                else:
                    references.append(_one_at_a_time(tokenizer, texts, length, seconds / 4))
                    found[name] = _measure(config, seconds)
                    rate = found[name]["real_tokens_per_s" if workers else "tokens_per_core_s"]
                    found[name]["ratio"] = round(rate / references[-1], 2)
                advance()
    return {
        "documents": len(texts),
        "batch": [batch_size, length],
        "workers": workers,
        "one_at_a_time_tokens_per_core_s": round(float(np.median(references))) if references else None,
        "backends": found,
    }


def _configs(text: Config, data: Path, scratch: Path, texts: list[str]) -> dict[str, Config]:
    """The same documents for each backend, in the files that it reads.

    Those of ArrayRecord are repeated: of the few that there are, all parts of the long ones would soon be kept.
    """
    for file in matching(text.grain_train_files, "--data"):
        for copy in range(_COPIES):
            (scratch / f"{copy}-{file.name}").symlink_to(file.resolve())
    pq.write_table(pa.table({"text": texts}), scratch / "text.parquet", row_group_size=256)
    (scratch / "text.json").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    files = {"parquet": str(scratch / "text.parquet"), "tfrecord": f"{data}/c4/en/3.0.1/*-train.tfrecord*"}
    tensorflow = text.replace(dataset_type="tfds", dataset_path=str(data))
    return {
        "grain_arrayrecord": text.replace(grain_train_files=f"{scratch}/*.array_record*", data_cache_dir=str(scratch)),
        **{f"grain_{k}": text.replace(grain_file_type=k, grain_train_files=f) for k, f in files.items()},
        "hf": text.replace(dataset_type="hf", hf_path="json", hf_train_files=str(scratch / "text.json")),
        "tfds": tensorflow,
        "c4_mlperf": tensorflow.replace(dataset_type="c4_mlperf"),
        "synthetic": text.replace(dataset_type="synthetic"),
    }


def _measure(config: Config, seconds: float) -> dict[str, Any]:
    started = time.perf_counter()
    with make_train_loader(config) as loader:
        next(loader)
        first_batch_s = time.perf_counter() - started
        for _ in range(_WARM_UP):
            next(loader)
        tokens, begun, cpu = 0, time.perf_counter(), time.process_time()
        report = getattr(loader, "report", None)
        if report is not None:
            report.reset()
        while (elapsed := time.perf_counter() - begun) < seconds:
            tokens += int((next(loader)["inputs_segmentation"] > 0).sum())
        result: dict[str, Any] = {"real_tokens_per_s": round(tokens / elapsed)}
        if not config.grain_worker_count:  # the time of other processes is not in it
            result["tokens_per_core_s"] = round(tokens / (time.process_time() - cpu))
        result["first_batch_s"] = round(first_batch_s, 2)
        if report is not None:
            value = report.to_json()
            shares = {name: stage["share"] for name, stage in value["stages"].items()}
            result |= {"padding_fraction": value["padding_fraction"], "time": shares}
        return result


def _one_at_a_time(path: Path, texts: list[str], length: int, seconds: float) -> float:
    """Tokens per second and core of the usual way: each document by itself, a list of numbers, cut into sequences."""
    tokenizer = load_tokenizer("sentencepiece", str(path))
    tokens, number, started, cpu = 0, 0, time.perf_counter(), time.process_time()
    row: list[int] = []
    while time.perf_counter() - started < seconds:
        document = [tokenizer.bos, *tokenizer.spell([texts[number % len(texts)]])[0], tokenizer.eos]
        number += 1
        row += [token for token in document if token is not None]
        while len(row) >= length:
            np.array(row[:length], dtype=np.int32)
            row = row[length:]
        tokens += len(document)
    return tokens / (time.process_time() - cpu)


if __name__ == "__main__":
    main()
