"""What the tests of the MaxText engine share: data, a tiny model, and runs as programs, of one or several processes."""

import importlib
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from record_batches import recording

from ping_llm.rows.prepare import PrepareSettings, prepare
from ping_llm.sources.simulator import SimulatorSettings, simulate

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "configs" / "maxtext" / "latency_network.yml"

_cache = tempfile.TemporaryDirectory(prefix="ping-llm-cache-")
_COMPILED = REPOSITORY / ".pytest_cache" / "jax-maxtext"
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",  # two processes may hang otherwise
    "HF_HUB_OFFLINE": "1",
    "PING_LLM_CACHE_DIR": _cache.name,
    # Compiles twice as fast.
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    # Nearly all runs train the same small model: they share the compiled programs, also the small ones.
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(1 << 30),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

settings.register_profile("fixed", derandomize=True, deadline=None)  # as in tests/conftest.py
settings.load_profile("fixed")

ON_A_CPU = {
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "attention": "dot_product",
    "dtype": "float32",
    "enable_tensorboard": False,
    "log_config": False,
    "jax_cache_dir": str(_COMPILED),
}
TINY = ON_A_CPU | {
    "base_num_decoder_layers": 1,
    "base_emb_dim": 32,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "base_mlp_dim": 48,
    "max_target_length": 128,
}


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    simulate(SimulatorSettings(measurements=20_000), folder / "raw")
    prepare(PrepareSettings(inputs=(str(folder / "raw" / "*.parquet"),), output=folder / "rows", workers=1))
    return folder / "rows"


@pytest.fixture(scope="session")
def c4() -> Path:
    """A small sample of C4, which is not part of the repository."""
    folder = Path(os.environ.get("PING_LLM_SHARED_DATA", REPOSITORY.parent / "shared" / "data")) / "c4-minimal"
    if not folder.is_dir():
        pytest.skip("the sample of C4 is not here; set PING_LLM_SHARED_DATA to the folder that holds c4-minimal")
    return folder


@pytest.fixture
def network(rows: Path, tmp_path: Path) -> dict[str, Any]:
    """A run of a few seconds on network data, in a batch of four sequences."""
    return TINY | {
        "run_name": "tiny",
        "base_output_directory": str(tmp_path),
        "network_train_files": str(rows),
        "network_eval_files": str(rows),
        "per_device_batch_size": 4,
        "grain_worker_count": 0,
        "grain_worker_count_eval": 0,
        "eval_interval": -1,
        "enable_checkpointing": False,
    }


def initialized(keys: dict[str, Any], config: str | Path = CONFIG) -> Any:
    """What MaxText makes of the keys, as its trainer would ask for it."""
    from ping_llm.integrations.maxtext.launch import patched

    with patched():
        return importlib.import_module("maxtext.configs.pyconfig").initialize(["", str(config), *arguments(keys)])


def arguments(keys: dict[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in keys.items()]


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    code: int
    log: str
    losses: dict[int, float] = field(default_factory=dict)
    batches: dict[int, list[str]] = field(default_factory=dict)
    """Of each step, the digests of the batch's sequences in their order."""

    def said(self, text: str) -> bool:
        return text in self.log


def start(keys: dict[str, Any], notes: Path, *, processes: int = 1, config: str | Path = CONFIG) -> "Started":
    """Begin a run, as one process or as several that find each other."""
    notes.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if processes > 1:
        environment |= {"JAX_COORDINATOR_ADDRESS": f"localhost:{_free_port()}", "JAX_NUM_PROCESSES": str(processes)}
    programs = []
    for number in range(processes):
        own = keys | {"metrics_file": notes / f"metrics-{number}.jsonl"}
        command: list[str | Path] = [
            sys.executable,
            Path(__file__).with_name("record_batches.py"),
            notes / f"batches-{number}.jsonl",
        ]
        with (notes / f"log-{number}.txt").open("w") as log:
            programs.append(
                subprocess.Popen(
                    [*command, str(config), *arguments(own)],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment | {"JAX_PROCESS_ID": str(number)},
                )
            )
    return Started(notes, programs)


@dataclass(frozen=True)
class Started:
    notes: Path
    programs: list["subprocess.Popen[bytes]"]

    def finish(self) -> Outcome:
        try:
            codes = [program.wait(timeout=600) for program in self.programs]
        finally:
            for program in self.programs:
                program.kill()
        return _outcome(max(map(abs, codes)), self.notes)


def run(keys: dict[str, Any], notes: Path, *, processes: int = 1, config: str | Path = CONFIG) -> Outcome:
    """A run from beginning to end that is expected to succeed."""
    outcome = start(keys, notes, processes=processes, config=config).finish()
    assert outcome.code == 0, outcome.log[-6000:]
    return outcome


def run_here(keys: dict[str, Any], notes: Path, *, config: str | Path = CONFIG) -> Outcome:
    """A run in this process, which saves the time to load MaxText. Its log has no error messages: see `capsys`."""
    from ping_llm.integrations.maxtext.launch import main

    notes.mkdir(parents=True, exist_ok=True)
    root, log = logging.getLogger(), logging.FileHandler(notes / "log-0.txt")
    level = root.level
    root.addHandler(log)
    root.setLevel(logging.INFO)
    try:
        with recording(notes / "batches-0.jsonl"):
            code = main(["", str(config), *arguments(keys | {"metrics_file": notes / "metrics-0.jsonl"})])
    finally:
        root.removeHandler(log)
        root.setLevel(level)
        log.close()
    return _outcome(code, notes)


def copy_run(keys: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same run, checkpoints included, somewhere else."""
    name = keys["run_name"]
    shutil.copytree(Path(keys["base_output_directory"]) / name, folder / name)
    return keys | {"base_output_directory": str(folder)}


def _outcome(code: int, notes: Path) -> Outcome:
    log = "".join(path.read_text() for path in sorted(notes.glob("log-*.txt")))
    parts: dict[int, dict[int, list[str]]] = {}
    for path in sorted(notes.glob("batches-*.jsonl")):
        for line in _lines(path):
            parts.setdefault(line["step"], {})[line["first"]] = line["sequences"]
    batches = {step: [d for _, part in sorted(of.items()) for d in part] for step, of in parts.items()}
    return Outcome(code=code, log=log, losses=_losses(notes), batches=batches)


def _losses(notes: Path) -> dict[int, float]:
    """MaxText empties its file of metrics at each evaluation: without one, of all steps."""
    lines = _lines(notes / "metrics-0.jsonl")
    return {int(line["step"]): float(line["learning/loss"]) for line in lines if "learning/loss" in line}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])
