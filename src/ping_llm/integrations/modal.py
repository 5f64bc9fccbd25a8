"""Preparation and training on rented machines of Modal (modal.com).

    modal run -m ping_llm.integrations.modal::prepare --input raw --output rows
    modal run -m ping_llm.integrations.modal::run --run-name my-run --steps 5000 --batch-size 128 --gpu H100

Data and runs are on two volumes, `ping-llm-data` and `ping-llm-runs`. A run that is interrupted, or reaches the 24
hours that a call may take, is called again by Modal and resumes from its last checkpoint. See docs/modal.md.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any, Final

from ping_llm.config import load_config
from ping_llm.core.console import err, out
from ping_llm.core.errors import PingLlmError, need
from ping_llm.rows.summary import render, summarise
from ping_llm.storage.mirror import newest_step

modal = need("modal", "modal", "ping_llm.integrations.modal")

DATA: Final = "/data"
RUNS: Final = "/runs"
_PYTHON: Final = "3.12"
_LOCK: Final = Path(__file__).resolve().parents[3] / "requirements.lock"
_DAY_S: Final = 24 * 3600
_MARGIN_S: Final = 900
"""A run saves and ends this long before the time limit of its call."""
_POLL_S: Final = 2.0
_SAVING_S: Final = 25.0
"""For the last checkpoint when the machine is taken away; Modal gives 30 s."""


def _image(*more: str) -> Any:
    """An image with this copy of the package and its dependencies, in the versions of the lock file if there is one."""
    try:
        found = [(line, line.partition("extra == ")[2].strip("'\"")) for line in requires("ping-llm") or []]
        needed = [line.partition(";")[0] for line, extra in found if extra in ("", "data", "train", "remote")]
        packages = [line for line in needed if not line.startswith("ping-llm[")]
    except PackageNotFoundError:  # this module is read on the rented machine, too, where the image is made already
        packages = []
    image = modal.Image.debian_slim(python_version=_PYTHON)
    options = ""
    if _LOCK.exists():
        image = image.add_local_file(_LOCK, "/requirements.lock", copy=True)
        options = "--constraint /requirements.lock"
    image = image.pip_install(*packages, *more, extra_options=options)
    return image.add_local_python_source("ping_llm", ignore=["**/__pycache__/**"])


app = modal.App("ping-llm", include_source=False)  # the image has it, with the files that are not Python
_data = modal.Volume.from_name("ping-llm-data", create_if_missing=True)
_runs = modal.Volume.from_name("ping-llm-runs", create_if_missing=True)


# -- on this machine: options are checked before anything is rented


@app.local_entrypoint()  # type: ignore[untyped-decorator]
def run(
    run_name: str,
    steps: int = 0,
    batch_size: int = 0,
    rows: str = "rows",
    config: str = "",
    set: str = "",
    project: str = "ping-llm",
    wandb_project: str = "",
    wandb_secret: str = "wandb-secret",
    gpu: str = "H100",
    hours: int = 24,
) -> None:
    """Train on a GPU. The same --run-name resumes where it stopped.

    --rows and --config: rows on the data volume (or s3://, gs://), and a configuration file of this machine.
    --set "key=value key=value": any other keys. --hours: the longest that one call may take.
    """
    with _one_line_errors():
        data: dict[str, Any] = {"rows": rows, "config": config, "changes": shlex.split(set)}
        where: dict[str, Any] = {"project": wandb_project or project, "wandb": bool(wandb_project)}
        job = plan_run(run_name=run_name, steps=steps, batch_size=batch_size, **data, **where)
        if not 1 <= hours <= 24:
            raise PingLlmError(f"--hours {hours}: Modal allows 1 to 24; a longer run resumes by itself")
        secrets = [modal.Secret.from_name(wandb_secret, required_keys=["WANDB_API_KEY"])] if wandb_project else []
        function = train_on_gpu.with_options(gpu=gpu, timeout=hours * 3600, secrets=secrets)
        summary = _checked(function.remote(**job, seconds=hours * 3600 - _MARGIN_S))
        for name, value in summary.items():
            out.print(f"{name}: {value}", markup=False, soft_wrap=True)
        out.print(f"the run: modal volume get ping-llm-runs {Path(job['run']).relative_to(RUNS)}", soft_wrap=True)


@app.local_entrypoint()  # type: ignore[untyped-decorator]
def prepare(input: str = "raw", output: str = "rows", cpu: float = 8.0, memory_gb: int = 16) -> None:
    """Make probe rows of measurements. Names are on the data volume, or s3://, gs://; several inputs: with spaces."""
    with _one_line_errors():
        function = prepare_on_cpus.with_options(cpu=cpu, memory=memory_gb * 1024)
        inputs = [on_volume(DATA, name) for name in shlex.split(input)]
        out.print(render(_checked(function.remote(inputs, on_volume(DATA, output)))))


def plan_run(
    *,
    run_name: str,
    steps: int = 0,
    batch_size: int = 0,
    rows: str = "rows",
    config: str = "",
    changes: list[str],
    project: str = "ping-llm",
    wandb: bool = False,
) -> dict[str, Any]:
    """Check the options and return the arguments of `train_on_gpu`."""
    if not run_name or "/" in run_name:
        raise PingLlmError(f"--run-name {run_name!r}: write a name for the run, without /")
    given = ["wandb_mode=offline"] if wandb else []
    if rows:
        given += [f"network_{split}_files={on_volume(DATA, rows)}" for split in ("train", "eval")]
    given += [*changes, f"run_name={run_name}", f"project={project}", f"base_output_directory={RUNS}"]
    if steps:
        given.append(f"steps={steps}")
    settings = load_config(config or None, given)
    return {
        "config": settings.to_yaml(),
        "options": [f"--batch-size={batch_size}"] if batch_size else [],
        "run": f"{RUNS}/{settings.project}/{settings.run_name}",
        "wandb": wandb,
    }


def on_volume(volume: str, name: str) -> str:
    """The path of a name on a volume. Names in a bucket and absolute paths stay as they are.

    >>> on_volume("/data", "rows"), on_volume("/data", "s3://bucket/rows")
    ('/data/rows', 's3://bucket/rows')
    """
    return name if "://" in name or name.startswith("/") else f"{volume}/{name}"


def _checked(result: dict[str, Any]) -> dict[str, Any]:
    if "error" in result:
        raise PingLlmError(str(result["error"]))
    return result


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except PingLlmError as error:
        raise SystemExit(f"error: {error}") from None


# -- on the rented machine


class NotFinishedError(Exception):
    """The run was saved before its end: another call resumes it."""


@app.function(  # type: ignore[untyped-decorator]
    image=_image(), cpu=8.0, memory=16 * 1024, volumes={DATA: _data}, timeout=_DAY_S
)
def prepare_on_cpus(inputs: list[str], output: str) -> dict[str, Any]:
    """Make probe rows. After an interruption, another call continues."""
    from ping_llm.rows.prepare import PrepareSettings
    from ping_llm.rows.prepare import prepare as make_rows
    from ping_llm.storage import locate

    with _volumes(_data, writes=_data):
        try:
            make_rows(PrepareSettings(inputs=tuple(inputs), output=output))
            return summarise(locate(output))
        except PingLlmError as error:
            return {"error": str(error)}


@app.function(  # type: ignore[untyped-decorator]
    image=_image("jax[cuda13]", "wandb>=0.30"),
    gpu="H100",
    cpu=8.0,
    memory=32 * 1024,
    volumes={DATA: _data, RUNS: _runs},
    timeout=_DAY_S,
    retries=modal.Retries(max_retries=10, initial_delay=1.0, backoff_coefficient=1.0),
    single_use_containers=True,
)
def train_on_gpu(
    config: str, options: list[str], run: str, wandb: bool = False, seconds: float = _DAY_S - _MARGIN_S
) -> dict[str, Any]:
    """Train or resume. Returns the summary or `{"error": …}`; raises an exception if Modal should call it again."""
    folder = Path(run)
    with _volumes(_data, _runs, writes=_runs) as commit:
        try:
            return train_rented(config, options, folder, seconds, commit)
        except PingLlmError as error:
            return {"error": str(error)}
        finally:
            parts = sorted(str(path) for path in (folder / "wandb").glob("offline-run-*")) if wandb else []
            if parts and subprocess.run(["wandb", "sync", *parts], check=False).returncode != 0:
                err.print(f"W&B: not sent; later: wandb sync {folder / 'wandb' / 'offline-run-*'}")


@contextmanager
def _volumes(*reads: Any, writes: Any) -> Iterator[Callable[[], None]]:
    """Reload the volumes. The function that the block gets commits what was written; so does the end of the block."""

    def commit() -> None:
        if not modal.is_local():
            writes.commit()

    if not modal.is_local():
        for volume in reads:
            volume.reload()
    try:
        yield commit
    finally:
        commit()


def train_rented(
    config: str, options: list[str], run: Path, seconds: float, commit: Callable[[], None]
) -> dict[str, Any]:
    """Train to the end, and return the summary. `config` is YAML, `options` are further ones of `ping-llm train`.

    Training runs in a process of its own, which can be made to save (by SIGTERM) when the `seconds` are over or the
    machine is taken away. `commit` makes each checkpoint durable. A `PingLlmError` is for the user to correct:
    another call would not help. Anything else, from the end of the time to a crash, is a `NotFinishedError`.
    """
    file = run.parent / f".{run.name}.yml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(config)
    command = [sys.executable, "-m", "ping_llm", "train", "--config", str(file), "--json", *options]
    training = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    end = time.monotonic() + seconds
    saved, stopping = newest_step(run), False
    try:
        while training.poll() is None:
            time.sleep(_POLL_S if end - time.monotonic() > _POLL_S else 0.1)
            before, saved = saved, newest_step(run)
            if saved > before:
                commit()
            if not stopping and time.monotonic() > end:
                training.terminate()
                stopping = True
    except BaseException:  # the machine is being taken away
        training.terminate()
        try:
            training.wait(_SAVING_S)
        except subprocess.TimeoutExpired:
            training.kill()
            training.wait()
        commit()
        raise
    output = training.communicate()[0]
    commit()
    if training.returncode == 1:
        raise PingLlmError("the run could not continue; its last lines above say why")
    if training.returncode != 0:
        raise NotFinishedError(f"training ended with code {training.returncode}")
    summary: dict[str, Any] = json.loads(output.splitlines()[-1])
    if not summary["complete"]:
        raise NotFinishedError(f"saved after {summary['steps']:,} steps; there are more to do")
    return summary
