"""What is disturbed: every command that writes, each on the smallest input that still goes all its ways."""

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from supervisor import Decide, Ended, supervise

from ping_llm.cli.main import main

BUCKET: Final = "measurements"
_UNFINISHED_CHECKPOINT: Final = ".orbax-checkpoint-tmp"

_WARM: Final = (
    "duckdb", "ping_llm.rows.prepare", "ping_llm.batches.source", "ping_llm.training.loop", "ping_llm.report.page",
    "ping_llm.sources.atlas", "ping_llm.sources.simulator", "ping_llm.evaluate.split",
)  # fmt: skip
"""Imported before processes are forked: each trial begins at once."""

Tree = dict[str, str]
"""The digest of each file, by its name below the trial's folder; objects of the store as `s3://…`."""


def ping_llm(*arguments: str) -> Callable[[], None]:
    def run() -> None:
        sys.argv = ["ping-llm", *arguments]
        main()

    return run


@dataclass(frozen=True)
class Job:
    command: Callable[..., Any]
    before: tuple[str, ...]
    """Folders of the pool with which it begins."""
    output: str
    """Whose files are compared; below the trial's folder, or in the store."""
    ignored: tuple[str, ...] = ()
    """Names of files that differ from run to run."""
    whole: bool = False
    """Whether the output is a folder that changes in one step."""
    summary: Callable[[], Any] | None = None
    """What is compared besides, computed by a process of its own."""
    changes: dict[str, str] = field(default_factory=dict)
    """Folders of the pool that begin under another name."""


def _mirror(action: str) -> Callable[[], None]:
    def run() -> None:
        from ping_llm.core.errors import PingLlmError
        from ping_llm.storage import locate
        from ping_llm.storage.mirror import Mirror

        try:
            mirror = Mirror(Path("runs/ping-llm/tiny"), locate(f"s3://{BUCKET}/run"))
            mirror.pull() if action == "pull" else mirror.finish()
        except (PingLlmError, OSError) as error:
            sys.exit(f"error: {error}")

    return run


def _model() -> None:
    """Losses of all steps, and the weights of the newest checkpoint."""
    import jax
    import numpy as np

    from ping_llm.runs import read_metrics
    from ping_llm.runs.trained import load_trained

    run = Path("runs/ping-llm/tiny")
    records = [(r["step"], r["loss"]) for r in read_metrics(run / "metrics.jsonl") if "loss" in r]
    weights = hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in jax.tree.leaves(load_trained(run).weights)))
    sys.stdout.write(json.dumps({"losses": records, "weights": weights.hexdigest()}) + "\n")


_RUN: Final = (
    "sessions.jsonl", "loss.png", "report.html", "summary.json", "checkpoints", "metrics.jsonl", "pipeline.json",
    "pipeline_graph.svg", "data.json",
)  # fmt: skip
_TRAIN: Final = (
    "base_output_directory=runs", "network_train_files=rows", "per_device_batch_size=2", "max_target_length=128",
    "base_num_decoder_layers=1", "base_emb_dim=16", "base_num_query_heads=1", "head_dim=16", "base_mlp_dim=16",
    "dtype=float32", "grain_worker_count=0", "enable_tensorboard=false", "checkpoint_period=1", "eval_interval=-1",
)  # fmt: skip


def train(steps: int) -> Callable[[], None]:
    return ping_llm("train", "--project", "ping-llm", "--name", "tiny", "--steps", str(steps), *_TRAIN)


_EXPORT: Final = ping_llm("export", "runs/ping-llm/tiny", "--output", "model", "--overwrite")
_SPLIT: Final = ping_llm("split", "raw", "--output", "split", "--overwrite")
_PREPARE: Final = ("prepare", "--input", "raw", "--workers", "1", "--output")

JOBS: Final = {
    "simulate": Job(ping_llm("simulate", "-o", "out", "-n", "900", "--overwrite"), ("out",), "out"),
    "import": Job(ping_llm("import", "atlas", "atlas/a.json", "atlas/b.json", "-o", "in", "--workers", "1"),
                  ("atlas",), "in"),
    "import per file": Job(ping_llm("import", "atlas", "atlas/a.json", "atlas/b.json", "-o", "in", "--per-file",
                                    "--workers", "1"), ("atlas",), "in", ("a.json.json", "b.json.json")),
    "split": Job(_SPLIT, ("raw", "split"), "split", whole=True),
    "prepare": Job(ping_llm(*_PREPARE, "rows"), ("raw",), "rows"),
    "prepare anew": Job(ping_llm(*_PREPARE, "rows", "--overwrite"), ("raw",), "rows", changes={"other rows": "rows"}),
    "prepare to a store": Job(ping_llm(*_PREPARE, f"s3://{BUCKET}/rows"), ("raw",), f"s3://{BUCKET}/rows"),
    "train": Job(train(4), ("rows", "runs"), "runs", _RUN, summary=_model),
    "export": Job(_EXPORT, ("runs",), "model", ("README.md",), whole=True, changes={"old model": "model"}),
    "copy to a store": Job(_mirror("push"), ("runs",), f"s3://{BUCKET}/run"),
    "copy from a store": Job(_mirror("pull"), ("s3 run",), "runs", whole=True),
}  # fmt: skip


class Store:
    """An S3 server (moto's) in a process of its own, and what it holds."""

    def __init__(self) -> None:
        program = "import sys, storage_fixtures as f; s = f.S3Server(); print(s.url, flush=True); sys.stdin.read()"
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        assert self._process.stdout
        self._url = self._process.stdout.readline().strip()
        self.environment = {
            "AWS_ENDPOINT_URL": self._url, "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing", "AWS_EC2_METADATA_DISABLED": "true", "PING_LLM_STORAGE_SECONDS": "2",
        }  # fmt: skip

    def _request(self, method: str, path: str, data: bytes | None = None) -> bytes:
        headers = {
            "Authorization": "AWS4-HMAC-SHA256 Credential=testing/20200101/us-east-1/s3/aws4_request",
            "Content-Type": "application/octet-stream",
        }
        with urllib.request.urlopen(urllib.request.Request(self._url + path, data, headers, method=method)) as reply:
            content: bytes = reply.read()
        return content

    def clear(self) -> None:
        self._request("POST", "/moto-api/reset")
        self._request("PUT", f"/{BUCKET}")

    def put(self, name: str, data: bytes) -> None:
        self._request("PUT", f"/{name}", data)

    def fill(self, folder: Path, name: str) -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(f"{BUCKET}/{name}/{path.relative_to(folder)}", path.read_bytes())

    def objects(self) -> dict[str, bytes]:
        listing = ElementTree.fromstring(self._request("GET", f"/{BUCKET}?list-type=2&max-keys=1000"))
        keys = [element.text or "" for element in listing.iter() if element.tag.endswith("}Key")]
        keys = [key for key in keys if not key.endswith("/")]  # marks of folders
        return {f"s3://{BUCKET}/{key}": self._request("GET", f"/{BUCKET}/{urllib.request.quote(key)}") for key in keys}  # type: ignore[attr-defined]

    def close(self) -> None:
        self._process.communicate()


class Bench:
    """Runs jobs again and again from the same beginning, in the same folder: results hold absolute names."""

    def __init__(self, root: Path) -> None:
        os.environ |= {  # which JAX reads when it is imported: each program is compiled in the first trial only
            "JAX_COMPILATION_CACHE_DIR": str(root / "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        for module in _WARM:
            importlib.import_module(module)
        self.pool, self.trial = root / "pool", root / "trial"
        self.store = Store()
        cache, temporary = str(self.trial / "cache"), str(self.trial / "tmp")
        os.environ |= self.store.environment | {"PING_LLM_CACHE_DIR": cache, "TMPDIR": temporary}
        self._make_pool()

    def _make_pool(self) -> None:
        """What jobs begin with."""
        from atlas_fixtures import as_lines, ping

        self.pool.mkdir(parents=True)
        self.begin(Job(_model, (), ""))
        atlas = self.trial / "atlas"
        atlas.mkdir()
        for number, name in enumerate(("a.json", "b.json")):
            (atlas / name).write_bytes(as_lines([ping(timestamp=1_700_000_000 + i) for i in range(50 + number)]))
        steps = (
            ping_llm("simulate", "-o", "raw", "-n", "1500"),
            ping_llm(*_PREPARE, "rows"),
            ping_llm("simulate", "-o", "out", "-n", "600", "--seed", "5"),
            ping_llm("split", "out", "-o", "split"),
            ping_llm("prepare", "-i", "out", "-o", "other rows", "--workers", "1"),
            train(2),
            ping_llm("export", "runs/ping-llm/tiny", "-o", "model"),
            _mirror("push"),
        )
        for step in steps:
            ended = supervise(step, self.trial)
            assert ended.code == 0, ended.stderr
        shutil.copytree(self.trial / "model", self.trial / "old model")
        (self.trial / "old model" / "config.yml").write_text("# of before\n")
        for folder in self.trial.iterdir():
            if folder.name not in ("tmp", "cache"):
                folder.rename(self.pool / folder.name)
        for name, content in self.store.objects().items():
            file = self.pool / "s3 run" / name.removeprefix(f"s3://{BUCKET}/run/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)

    def begin(self, job: Job) -> None:
        shutil.rmtree(self.trial, ignore_errors=True)
        (self.trial / "tmp").mkdir(parents=True)
        self.store.clear()
        for name, target in (dict(zip(job.before, job.before, strict=True)) | job.changes).items():
            if name.startswith("s3 "):
                self.store.fill(self.pool / name, name.removeprefix("s3 "))
            else:
                shutil.copytree(self.pool / name, self.trial / target)

    def run(self, job: Job, decide: Decide | None = None) -> Ended:
        return supervise(job.command, self.trial, decide)

    def names(self, job: Job) -> list[str]:
        """The files of a local output, those that are ignored left out."""
        files = [path for path in (self.trial / job.output).rglob("*") if path.is_file()]
        names = [str(path.relative_to(self.trial)) for path in files]
        return [name for name in names if not set(name.split("/")) & {*job.ignored}]

    def tree(self, job: Job) -> Tree:
        """The output as it is now, leftovers included."""
        if job.output.startswith("s3://"):
            contents = {name: data for name, data in self.store.objects().items() if name.startswith(job.output)}
        else:
            contents = {name: (self.trial / name).read_bytes() for name in self.names(job)}
        return {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}

    def result(self, job: Job) -> Any:
        """What a job that ended well has made."""
        if job.summary is None:
            return self.tree(job)
        ended = supervise(job.summary, self.trial)
        return self.tree(job), json.loads(ended.stdout.splitlines()[-1]) if ended.code == 0 else ended.stderr

    @contextmanager
    def closing(self) -> Iterator["Bench"]:
        try:
            yield self
        finally:
            self.store.close()


def visible(tree: Tree) -> Tree:
    """Without what is written under hidden names, and so never read."""
    return {name: digest for name, digest in tree.items() if not any(map(_is_hidden, name.split("/")))}


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or _UNFINISHED_CHECKPOINT in name
