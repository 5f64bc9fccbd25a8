"""Preparation and training on rented machines of Modal (modal.com).

    modal run -m ping_llm.engines.modal::prepare --input raw --output rows
    modal run -m ping_llm.engines.modal::run --run-name my-run --steps 5000 --batch-size 128 --gpu H100

Data and runs are on two volumes, `ping-llm-data` and `ping-llm-runs`. A run that is interrupted, or reaches the 24
hours that a call may take, is called again by Modal and goes on from its last checkpoint. See docs/modal.md.
"""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any, Final

from ping_llm.backends.extras import need
from ping_llm.config import load_config
from ping_llm.console import err, out
from ping_llm.engines.rented import Job, sync_wandb, train_rented
from ping_llm.errors import PingLlmError
from ping_llm.rows.summary import render, summarise

modal = need("modal", "modal", "ping_llm.engines.modal")

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
