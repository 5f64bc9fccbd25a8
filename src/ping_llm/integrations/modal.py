"""A command on a machine that is rented by the hour and may be taken away: what `modal.py` runs there.

Training is a program of its own, so that it can be asked to save (SIGTERM) when the time is over or the machine is
taken away. Whenever it has saved, `commit` makes that safe.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any, Final

from ping_llm.config import load_config
from ping_llm.core.console import err, out
from ping_llm.core.errors import PingLlmError, need
from ping_llm.rows.summary import render, summarise

_LOOK_EVERY_S: Final = 2.0
_SAVING_S: Final = 25.0
"""For the last checkpoint when the machine is taken away; Modal gives 30 s."""

_DONE, _WRONG_INPUT = 0, 1


class NotFinishedError(Exception):
    """The run has been saved, and there is more to do: call again, and it goes on."""


@dataclass(frozen=True, kw_only=True)
class Job:
    config: str
    """The configuration, as YAML."""
    run: Path
    """The run's folder."""
    options: tuple[str, ...] = ()
    """More options of `ping-llm train`."""
    seconds: float
    """How long it may take; it saves and ends, then."""


def train_rented(job: Job, commit: Callable[[], None]) -> dict[str, Any]:
    """Train until it is done, and return the summary.

    What the user must mend is a `PingLlmError`: trying again does not help. Everything else, from the end of the
    allotted time to a crash, is a `NotFinishedError` after which to call again.
    """
    file = job.run.parent / f".{job.run.name}.yml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(job.config)
    command = [sys.executable, "-m", "ping_llm", "train", "--config", str(file), "--json", *job.options]
    training = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    try:
        _look_after(training, job, commit)
    except BaseException:  # the machine is being taken away
        _stop(training)
        commit()
        raise
    output = training.communicate()[0]
    commit()
    if training.returncode == _WRONG_INPUT:
        raise PingLlmError("the run could not go on; its last lines above say why")
    if training.returncode != _DONE:
        raise NotFinishedError(f"training ended with code {training.returncode}")
    summary: dict[str, Any] = json.loads(output.splitlines()[-1])
    if not summary["complete"]:
        raise NotFinishedError(f"saved after {summary['steps']:,} steps; there are more to do")
    return summary


def _look_after(training: "subprocess.Popen[str]", job: Job, commit: Callable[[], None]) -> None:
    end = time.monotonic() + job.seconds
    saved = saved_steps(job.run)
    asked = False
    while training.poll() is None:
        time.sleep(_LOOK_EVERY_S if end - time.monotonic() > _LOOK_EVERY_S else 0.1)
        now = saved_steps(job.run)
        if now - saved:
            commit()
        saved = now
        if not asked and time.monotonic() > end:
            training.terminate()
            asked = True


def saved_steps(run: Path) -> set[int]:
    """Checkpoints that are whole: one that is being written has another name."""
    return {int(path.name) for path in (run / "checkpoints").glob("[0-9]*") if path.name.isdecimal()}


def _stop(training: "subprocess.Popen[str]") -> None:
    training.terminate()
    try:
        training.wait(_SAVING_S)
    except subprocess.TimeoutExpired:
        training.kill()
        training.wait()


def sync_wandb(run: Path, tool: Sequence[str] = ("wandb",)) -> bool:
    """Send what a run kept for Weights & Biases; its parts are sent in their order. Whether that worked."""
    parts = sorted(str(path) for path in (run / "wandb").glob("offline-run-*"))
    return not parts or subprocess.run([*tool, "sync", *parts], check=False).returncode == 0


# Preparation and training on rented machines of Modal (modal.com).
#
#     modal run -m ping_llm.integrations.modal::prepare --input raw --output rows
#     modal run -m ping_llm.integrations.modal::run --run-name my-run --steps 5000 --batch-size 128 --gpu H100
#
# Data and runs are on two volumes, `ping-llm-data` and `ping-llm-runs`. A run that is interrupted, or reaches the 24
# hours that a call may take, is called again by Modal and goes on from its last checkpoint. See docs/modal.md.

modal = need("modal", "modal", "ping_llm.integrations.modal")

DATA: Final = "/data"
RUNS: Final = "/runs"
_PYTHON: Final = "3.12"
_LOCK: Final = Path(__file__).resolve().parents[3] / "requirements.lock"
_DAY_S: Final = 24 * 3600
_MARGIN_S: Final = 900
"""Before the time that a call may take is over, a run saves and ends by itself."""


def _image(*more: str) -> Any:
    """What ping-llm needs, in the versions of the lock file if there is one, and the package as it is here."""
    image = modal.Image.debian_slim(python_version=_PYTHON)
    options = ""
    if _LOCK.exists():
        image = image.add_local_file(_LOCK, "/requirements.lock", copy=True)
        options = "--constraint /requirements.lock"
    image = image.pip_install(*_packages(), *more, extra_options=options)
    return image.add_local_python_source("ping_llm", ignore=["**/__pycache__/**"])


def _packages() -> list[str]:
    try:
        return [line for line in requires("ping-llm") or [] if "extra ==" not in line]
    except PackageNotFoundError:  # this module is read on the rented machine, too, where the image is made already
        return []


app = modal.App("ping-llm", include_source=False)  # the image has it, with the files that are not Python
_data = modal.Volume.from_name("ping-llm-data", create_if_missing=True)
_runs = modal.Volume.from_name("ping-llm-runs", create_if_missing=True)


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
    """Train, or go on: the summary, or `{"error": …}`. It raises where Modal is to call it again."""
    _reload(_data, _runs)
    folder = Path(run)
    try:
        job = Job(config=config, run=folder, options=tuple(options), seconds=seconds)
        return train_rented(job, lambda: _commit(_runs))
    except PingLlmError as error:
        return {"error": str(error)}
    finally:
        if wandb and not sync_wandb(folder):
            err.print(f"W&B: not sent; later: wandb sync {folder / 'wandb' / 'offline-run-*'}", soft_wrap=True)
        _commit(_runs)


@app.function(  # type: ignore[untyped-decorator]
    image=_image(), cpu=8.0, memory=16 * 1024, volumes={DATA: _data}, timeout=_DAY_S
)
def prepare_on_cpus(inputs: list[str], output: str) -> dict[str, Any]:
    """Make probe rows. If it is interrupted, call it again: it continues."""
    from ping_llm.rows.prepare import PrepareSettings
    from ping_llm.rows.prepare import prepare as make_rows
    from ping_llm.storage import locate

    _reload(_data)
    try:
        make_rows(PrepareSettings(inputs=tuple(inputs), output=output))
        return summarise(locate(output))
    except PingLlmError as error:
        return {"error": str(error)}
    finally:
        _commit(_data)


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
    """Train on a GPU. The same --run-name goes on where it stopped.

    --rows and --config: rows on the data volume (or s3://, gs://), and a configuration file of this machine.
    --set "key=value key=value": any other keys. --hours: the longest that one call may take.
    """
    with _one_line_errors():
        job = plan_run(
            run_name=run_name,
            steps=steps,
            batch_size=batch_size,
            rows=rows,
            config=config,
            changes=shlex.split(set),
            project=wandb_project or project,
            wandb=bool(wandb_project),
        )
        if not 1 <= hours <= 24:
            raise PingLlmError(f"--hours {hours}: Modal allows 1 to 24; a longer run goes on by itself")
        chosen: dict[str, Any] = {"gpu": gpu, "timeout": hours * 3600}
        if wandb_project:
            chosen["secrets"] = [modal.Secret.from_name(wandb_secret, required_keys=["WANDB_API_KEY"])]
        function = train_on_gpu.with_options(**chosen)
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
        summary = _checked(function.remote(inputs, on_volume(DATA, output)))
        out.print(render(summary))


def plan_run(
    *,
    run_name: str,
    steps: int,
    batch_size: int,
    rows: str,
    config: str,
    changes: list[str],
    project: str,
    wandb: bool,
    data: str = DATA,
    runs: str = RUNS,
) -> dict[str, Any]:
    """The arguments of `train_on_gpu`. What is wrong with them is said here, before a machine is rented."""
    if not run_name or "/" in run_name:
        raise PingLlmError(f"--run-name {run_name!r}: write a name for the run, without /")
    given = ["wandb_mode=offline"] if wandb else []
    if rows:
        where = on_volume(data, rows)
        given += [f"network_train_files={where}", f"network_eval_files={where}"]
    given += [*changes, f"run_name={run_name}", f"project={project}", f"base_output_directory={runs}"]
    if steps:
        given.append(f"steps={steps}")
    settings = load_config(config or None, given)
    options = [f"--batch-size={batch_size}"] if batch_size else []
    return {
        "config": settings.to_yaml(),
        "options": options,
        "run": str(Path(runs) / settings.project / settings.run_name),
        "wandb": wandb,
    }


def on_volume(volume: str, name: str) -> str:
    """Names in a bucket and absolute ones stay as they are.

    >>> on_volume("/data", "rows"), on_volume("/data", "s3://bucket/rows")
    ('/data/rows', 's3://bucket/rows')
    """
    return name if "://" in name or name.startswith("/") else f"{volume}/{name}"


def _reload(*volumes: Any) -> None:
    if not modal.is_local():
        for volume in volumes:
            volume.reload()


def _commit(volume: Any) -> None:
    if not modal.is_local():
        volume.commit()


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
