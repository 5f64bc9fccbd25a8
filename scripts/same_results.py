"""Does this tree compute what another commit computed? For refactoring under proof.

    python scripts/same_results.py b50d7e3

runs the same small jobs with the sources of that commit and with those of this tree, in one environment, and compares:
bytes of simulated measurements and of probe rows, batches of several seeds, lengths and worker counts, text batches,
losses of training runs (one of them resumed), exported weights, and predictions of both models and of the classical
predictors. Exits with 1 if anything differs. It takes about five minutes on two cores.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT.parent / "shared" / "data" / "c4-minimal"
ANSWERS = 1e-5
"""Relative difference that is allowed between predictions; everything else must be equal."""

TINY = (
    "max_target_length=128 per_device_batch_size=4 eval_interval=-1 checkpoint_period=4 log_period=1 dtype=float32 "
    "base_num_decoder_layers=2 base_emb_dim=32 base_num_query_heads=2 head_dim=16 base_mlp_dim=48"
)
TINY_COMPLETER = (
    "dataset_type=worlds per_device_batch_size=2 eval_interval=-1 enable_checkpointing=false log_period=1 "
    "base_num_decoder_layers=2 base_emb_dim=48 base_num_query_heads=2 head_dim=16 base_mlp_dim=48 completer_identity=8"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("commit", nargs="?", help="the commit to compare with")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)  # what runs in each of the two trees
    options = parser.parse_args()
    if options.record:
        options.record.write_text(json.dumps(record()))
        return
    if options.commit is None:
        parser.error("name the commit to compare with")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, options.commit], cwd=ROOT, check=True)
        try:
            before, after = (recorded(sources, Path(folder) / name) for name, sources in (("b", tree), ("a", ROOT)))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    sys.exit(0 if compared(before, after) else 1)


def recorded(tree: Path, output: Path) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PING_LLM_TREE": str(tree)}
    subprocess.run([sys.executable, __file__, "--record", output], env=environment, check=True)
    return dict(json.loads(output.read_text()))


def compared(before: dict[str, Any], after: dict[str, Any]) -> bool:
    same = True
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        if name.startswith("answers"):
            off = max((difference(a, b) for a, b in zip(numbers(old), numbers(new), strict=True)), default=0.0)
            is_same, how = off <= ANSWERS, f"largest relative difference {off:.1e}"
        else:
            is_same, how = old == new, "equal" if old == new else f"{str(old)[:60]} -> {str(new)[:60]}"
        same &= is_same
        sys.stdout.write(f"{'same ' if is_same else 'OTHER'}  {name:55} {how}\n")
    return same


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [x for key in sorted(value) for x in numbers(value[key])]
    if isinstance(value, list):
        return [x for item in value for x in numbers(item)]
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def difference(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b), 1e-9)


def record() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for part in (data, batches, text_batches, training, answers):
            for name, value in part():
                found[name] = value
                sys.stderr.write(f"  {name}\n")
    return found


Results = Iterator[tuple[str, Any]]


def data() -> Results:
    ping_llm("simulate --measurements 40000 --seed 3 --output raw")
    yield "bytes of simulated measurements", digests("raw", "*.parquet")
    ping_llm("split raw --output split")
    yield "bytes of a split", digests("split", "**/*.parquet")
    for workers in (1, 2):
        ping_llm(f"prepare --input split/train --output rows{workers} --workers {workers}")
        yield (
            f"bytes of probe rows, {workers} workers",
            digests(f"rows{workers}", "*.arrayrecord") + digests(f"rows{workers}", "*.index"),
        )


def batches() -> Results:
    for seed, length, workers in ((0, 128, 0), (1, 512, 0), (0, 128, 2)):
        keys = {
            "network_train_files": "rows1",
            "data_shuffle_seed": seed,
            "max_target_length": length,
            "per_device_batch_size": 8,
            "grain_worker_count": workers,
        }
        yield f"batches, seed {seed}, length {length}, {workers} workers", batch_digest(keys, 40)
    blend = {"network_train_files": "rows1,0.3;rows2,0.7", "max_target_length": 256, "per_device_batch_size": 4}
    yield "batches of a blend", batch_digest(blend, 40)


def text_batches() -> Results:
    if TEXT.exists():
        keys = {
            "dataset_type": "grain",
            "grain_file_type": "arrayrecord",
            "grain_train_files": str(TEXT / "c4/en/3.0.1/c4-train.array_record-*"),
            "tokenizer_path": str(TEXT / "tokenizer.default.model"),
            "max_target_length": 256,
            "per_device_batch_size": 4,
        }
        yield "batches of text (ArrayRecord)", batch_digest(keys, 10)


def training() -> Results:
    rows = ["network_train_files=rows1", "network_eval_files=rows1", "base_output_directory=runs"]
    for optimizer in ("adamw", "muon"):
        train(f"whole-{optimizer}", 8, [*rows, *TINY.split(), f"opt_type={optimizer}"])
        yield f"losses, {optimizer}", losses(f"whole-{optimizer}")
    for steps in (4, 8):
        train("resumed", steps, [*rows, *TINY.split(), "opt_type=muon"])
    yield "losses of a resumed run", losses("resumed")
    ping_llm("export runs/ping-llm/whole-adamw --output model")
    yield "bytes of exported weights", digests("model", "*.safetensors")
    train("completer", 3, [*TINY_COMPLETER.split(), "base_output_directory=runs"])
    yield "losses of a completer on simulated topologies", losses("completer")


def answers() -> Results:
    import pyarrow.csv
    import pyarrow.parquet

    table = pyarrow.parquet.read_table("split/train").slice(0, 1500)
    pyarrow.csv.write_csv(table, "history.csv")
    pairs = list(dict.fromkeys(zip(*(table[c].to_pylist() for c in ("src_addr", "dst_addr")), strict=True)))[:40:4]
    known = [(s, d) for s, _ in pairs[:4] for _, d in pairs[4:8] if (":" in s) == (":" in d)]
    Path("questions.csv").write_text("src_addr,dst_addr\n" + "".join(f"{s},{d}\n" for s, d in [*pairs, *known]))
    for model, options in (("completer", ""), ("language model", " --checkpoint model")):
        answered = ping_llm(f"predict --history history.csv --questions questions.csv --json{options}")
        yield f"answers of the {model}", json.loads(answered.splitlines()[-1])
    scores = ping_llm("evaluate --data split --world raw --questions 20 --json")
    yield "answers of the classical predictors (scores)", json.loads(scores.splitlines()[-1])


def ping_llm(arguments: str) -> str:
    command = [sys.executable, "-m", "ping_llm", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"ping-llm {arguments}: {done.stderr}")
    return done.stdout


def train(name: str, steps: int, keys: list[str]) -> None:
    ping_llm(f"train --name {name} --steps {steps} {' '.join(keys)}")


def losses(name: str) -> list[float]:
    lines = Path("runs/ping-llm", name, "metrics.jsonl").read_text().splitlines()
    by_step = {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}
    return [by_step[step] for step in sorted(by_step)]


def digests(folder: str, pattern: str) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in sorted(Path(folder).glob(pattern))]


def batch_digest(keys: dict[str, Any], count: int) -> str:
    from ping_llm.config import load_config

    is_layered = importlib.util.find_spec("ping_llm.data") is not None
    module = importlib.import_module("ping_llm.data.registry" if is_layered else "ping_llm.pipeline.factory")
    digest = hashlib.sha256()
    with module.make_train_loader(load_config(None, [f"{key}={value}" for key, value in keys.items()])) as loader:
        for _ in range(count):
            batch = next(loader)
            for name in sorted(batch):
                digest.update(batch[name].tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
