"""A training run, from its beginning or its last checkpoint to its end."""

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ping_llm.batches.spec import EvalLoader
from ping_llm.config import Config
from ping_llm.config.keys import COMPLETER_DATA
from ping_llm.core.console import err, progress
from ping_llm.core.errors import PingLlmError, explained
from ping_llm.core.files import exclusive, remove_unfinished
from ping_llm.data import registry
from ping_llm.runs import RunFolder
from ping_llm.runs.device import on_device
from ping_llm.runs.task import task_of
from ping_llm.runs.trained import load_trained
from ping_llm.runs.weights import begin_with
from ping_llm.training.metrics import Metrics, Pace, draw_losses, peak_flops
from ping_llm.training.processes import StopRequest, failing_together, start_processes
from ping_llm.training.state import (
    Checkpoints,
    TrainState,
    batch_sharding,
    check_resumable,
    create_state,
    data_state,
    make_mesh,
    state_shapes,
)
from ping_llm.training.step import StepValues, learning_rates, make_eval_step, make_optimizer, make_train_step

AtEnd = Callable[[RunFolder, Any], None]

_STEPS_IN_FLIGHT: Final = 2
"""The numbers of a step are read when this many later steps wait on the device, so that it is never idle."""
_RISING: Final = 1.01
"""An evaluation loss above the lowest one by this factor is reported as rising."""


def train(config: Config, *, at_end: AtEnd | None = None) -> dict[str, Any]:
    """Train until `steps` steps are done or a signal stops the run. Returns the contents of `summary.json`.

    `at_end` writes the report: it is called with the folder and the loader when the run ends, also by an error.
    """
    start_processes(config)
    if not config.run_name:
        config = config.replace(run_name=time.strftime("%Y%m%d-%H%M%S"))
    folder = RunFolder.of(config)
    stopped = explained(f"the run {folder} stopped; what was saved is kept, and the same command resumes", OSError)
    with failing_together(), stopped, contextlib.ExitStack() as alone:
        if jax.process_index() == 0:  # no second run writes to the folder; the others write nothing but their arrays
            alone.enter_context(exclusive(folder.lock, f"the run {folder}"))
            remove_unfinished(folder.path)
        try:
            run = _Run(config, folder, at_end)
        except BaseException:
            folder.forget_if_empty()
            raise
        with run:
            run.announce()
            run.loop()
            summary = run.finish()
        if run.mirror is not None:
            run.mirror.finish()
        return summary


class _Run:
    def __init__(self, config: Config, folder: RunFolder, at_end: AtEnd | None) -> None:
        self.config = config
        self.at_end = at_end
        self.folder = folder
        self.is_main = jax.process_index() == 0
        self.mirror = self.folder.mirror
        self._check()
        if self.mirror is not None:
            self.mirror.pull()
        self.mesh = make_mesh(config)
        self.task = task_of(config)
        registry.check_files(config)
        if self.folder.has_checkpoints:
            if not config.enable_checkpointing:
                raise PingLlmError(f"{self.folder} has checkpoints, which enable_checkpointing=false would not resume")
            check_resumable(self.folder.config, config)
        self.checkpoints = Checkpoints(self.folder.checkpoints, config) if config.enable_checkpointing else None
        optimizer = make_optimizer(config)
        restored = self.checkpoints and self.checkpoints.restore(state_shapes(config, optimizer, self.mesh))
        self.step, self.state, data = restored or (0, self._initial_state(optimizer), None)
        self.resumed_from = self.step if restored else None
        self.hosts = {"devices": jax.device_count(), "host": jax.process_index(), "hosts": jax.process_count()}
        self.loader = registry.make_train_loader(config, **self.hosts, state=data)
        self.data_state = self.loader.state()
        self.train_step = make_train_step(self.task, optimizer, config)
        self.eval_step = make_eval_step(task_of(config.replace(quantization="none")))  # as the model will be used
        self.learning_rates = learning_rates(config)
        self.peak = peak_flops(config)
        self.pace = Pace(self.task.flops_per_token, self.peak and self.peak * jax.device_count())
        self.metrics = Metrics(config, folder, self.step, self.task.arithmetic, self.peak) if self.is_main else None
        self.max_segments = 1
        self.compiled_for = 0
        self.in_flight: deque[tuple[int, StepValues]] = deque()
        self.loss: float | None = None
        self.eval_loss: float | None = None
        self.evaluated_at: int | None = None
        self.lowest_eval_loss = math.inf, 0  # and the step at which it was measured
        self.stopped_by: int | None = None
        if self.is_main:  # only now: if a session fails before this, the run stays as it was
            self.folder.write(self.folder.config, config.to_yaml())

    def _check(self) -> None:
        c, devices = self.config, jax.device_count()
        if self.mirror is not None and jax.process_count() > 1:
            raise PingLlmError(
                f"base_output_directory={c.base_output_directory}: a run of several processes needs a folder "
                "that all of them see; copy it to the store afterwards"
            )
        sequences = c.per_device_batch_size * devices
        if sequences % (c.gradient_accumulation_steps * devices):
            raise PingLlmError(
                f"a batch of {sequences:g} sequences cannot be split over {devices} device(s) and "
                f"gradient_accumulation_steps={c.gradient_accumulation_steps}"
            )
        if c.eval_per_device_batch_size % 1:
            raise PingLlmError(f"eval_per_device_batch_size={c.eval_per_device_batch_size:g} must be a whole number")

    def _initial_state(self, optimizer: optax.GradientTransformation) -> TrainState:
        state = create_state(self.config, optimizer, self.mesh)
        if not self.config.load_parameters_path:
            return state
        weights = begin_with(load_trained(self.config.load_parameters_path), state.weights)
        average = None if state.average is None else jax.tree.map(jnp.copy, weights)
        return state._replace(weights=weights, average=average)

    def announce(self) -> None:
        if not self.is_main:
            return
        c, task, devices = self.config, self.task, jax.device_count()
        what = "contexts" if c.dataset_type in COMPLETER_DATA else f"sequences of {c.max_target_length} tokens"
        peak = f"{self.peak / 1e12:,.0f} TFLOP/s per device" if self.peak else "unknown here (peak_tflops sets it)"
        for line in (
            f"run [bold]{self.folder}[/] on {devices} × {jax.devices()[0].device_kind}, "
            f"{jax.process_count()} process(es)",
            f"model: {task.parameters / 1e6:,.1f} M parameters ({task.shape}), {task.cost}, {task.arithmetic}",
            f"batch: {int(c.per_device_batch_size * devices)} {what}; {c.steps:,} steps of {c.opt_type}, "
            f"{c.learning_rate_schedule}, learning rate {c.learning_rate:g}",
            f"peak for model FLOPs utilization (MFU): {peak}",
            *([f"resumed after {self.resumed_from:,} steps"] if self.resumed_from is not None else []),
        ):
            err.print(line)

    def loop(self) -> None:
        c = self.config
        with (
            StopRequest() as stop,
            self.loader,
            on_device(self.loader, batch_sharding(self.mesh)) as batches,
            progress("training", total=c.steps, every_s=math.inf) as advance,  # steps have lines
        ):
            advance(self.step)
            while self.step < c.steps:
                self._profile()
                self._one_step(batches)
                advance()
                if c.eval_interval > 0 and self.step % c.eval_interval == 0:
                    self._evaluate()
                if c.checkpoint_period > 0 and self.step % c.checkpoint_period == 0 and self.step < c.steps:
                    self._save()
                if stop.agreed(self.step):
                    self.stopped_by = stop.signal
                    break
            if self.step != self.resumed_from:
                self._drain(0)
                if c.eval_interval > 0 and self.stopped_by is None and self.evaluated_at != self.step:
                    self._evaluate()
                self._save()

    def _one_step(self, batches: Iterator[Any]) -> None:
        asked = time.perf_counter()
        batch = next(batches)
        self.pace.wait(time.perf_counter() - asked)
        max_segments = self._max_segments(self.loader, self.step)
        if max_segments != self.compiled_for:
            self._pause()  # to compile
            self.compiled_for = max_segments
        self.state, values = self.train_step(self.state, batch, max_segments)
        self.in_flight.append((self.step, values))
        self.step += 1
        self._drain(_STEPS_IN_FLIGHT)

    def _pause(self) -> None:
        self._drain(0)
        self.pace.pause()

    def _max_segments(self, loader: EvalLoader, step: int) -> int:
        """The number of segments to compile attention for. It is rounded up and never falls, because each new value is
        compiled anew; plain attention needs none."""
        if self.task.needs_max_segments:
            self.max_segments = max(self.max_segments, rounded_up(loader.max_segments(step)))
        return self.max_segments

    def _drain(self, leave: int) -> None:
        """Read the numbers of all but the last `leave` steps, which the device is still working on."""
        while len(self.in_flight) > leave:
            step, values = self.in_flight.popleft()
            numbers = {name: np.asarray(value).item() for name, value in values.items()}
            self.pace.step(numbers["real_tokens"])
            self.loss = numbers["loss"]
            if self.metrics:
                rate = float(self.learning_rates[step])
                record = {"step": step, **numbers, "learning_rate": rate, **self.pace.recent()}
                is_time = (step + 1) % self.config.log_period == 0
                self.metrics.write(record, everywhere=is_time)
                if is_time:
                    self._log(record)
            for name, words in (("loss", "loss"), ("grad_norm", "gradient norm")):
                if not math.isfinite(numbers[name]):
                    raise PingLlmError(self._diverged(step, f"the {words} of step {step} is {numbers[name]}"))

    def _log(self, record: dict[str, Any]) -> None:
        rate, mfu, wait = (record[name] for name in ("real_tokens_per_s", "mfu", "data_wait_fraction"))
        speed = "" if rate is None else f"  {rate:>9,} tokens/s  waiting for data {wait:.1%}"
        speed += "" if mfu is None else f"  MFU {mfu:.1%}"
        err.print(
            f"step {record['step'] + 1:>6}  loss {record['loss']:.4f}  gradient {record['grad_norm']:.3f}{speed}",
            markup=False,
        )

    def _diverged(self, step: int, what: str) -> str:
        source = f"{self.config.dataset_type} data"
        if self.config.dataset_type == "network" and self.config.network_data_format == "probe_chunks":
            from ping_llm.contexts.source import rows_of_batch
            from ping_llm.data.registry import spec_from_config

            source = rows_of_batch(spec_from_config(self.config, "train", jax.device_count()), step)
        saved = "no checkpoint was saved before" if self.checkpoints is None else "earlier checkpoints are sound"
        return (
            f"{what}; {saved}. The batch came from {source}. Look at it "
            f"with: ping-llm inspect batch --config {self.folder.config} --step {step}. Then lower learning_rate or "
            "gradient_clipping_threshold, or change data_shuffle_seed"
        )

    def _evaluate(self) -> None:
        self._pause()
        config = self.config.replace(grain_worker_count=0, grain_visualization_dir="", grain_debug_mode=False)
        loader = registry.make_eval_loader(config, **self.hosts)
        with loader, on_device(loader, batch_sharding(self.mesh)) as batches:
            sums = [
                self.eval_step(self.state.best_weights, batch, self._max_segments(loader, number))
                for number, batch in enumerate(batches)
            ]
        targets = sum(int(part["targets"]) for part in sums)
        self.eval_loss = sum(float(part["cross_entropy"]) for part in sums) / max(1, targets)
        self.evaluated_at = self.step
        if self.metrics:
            record = {"step": self.step, "eval_loss": self.eval_loss, "eval_targets": targets}
            self.metrics.write(record, everywhere=True)
            lowest, at = self.lowest_eval_loss
            rising = ""
            if self.eval_loss > _RISING * lowest:
                rising = f"; it was {lowest:.4f} after step {at}: fewer steps or more data would predict better"
            err.print(f"step {self.step:>6}  evaluation loss {self.eval_loss:.4f} over {targets:,} tokens{rising}")
        self.lowest_eval_loss = min(self.lowest_eval_loss, (self.eval_loss, self.step))

    def _save(self) -> None:
        if self.checkpoints is None:
            return
        self._pause()  # raises if the loss is not finite: such a state is not saved
        data = data_state(self.loader, self.data_state, self.step)
        fresh = self.eval_loss if self.evaluated_at == self.step else None
        self.checkpoints.save(self.step, self.state, data, self.config.to_yaml(), fresh)
        if self.mirror is not None and self.step < self.config.steps:
            self.mirror.push_soon(self.step)

    def _profile(self) -> None:
        if not self.config.profile_steps:
            return
        first, end = map(int, self.config.profile_steps.split(":"))
        if self.step == first:
            jax.profiler.start_trace(str(self.folder.profile))
        if self.step == end:
            self._drain(0)
            jax.profiler.stop_trace()

    def finish(self) -> dict[str, Any]:
        if self.checkpoints:
            self.checkpoints.wait()
        if self.step == self.resumed_from and self.folder.summary.exists():
            return json.loads(self.folder.summary.read_text())  # there was nothing left to do
        summary = {
            "final_loss": self.loss,
            "eval_loss": self.eval_loss,
            **self.pace.overall(),
            "steps": self.step,
            "complete": self.step >= self.config.steps,
            "resumed_from": self.resumed_from,
            "stopped_by_signal": self.stopped_by,
            "parameters": self.task.parameters,
            "run": str(self.folder),
        }
        if self.is_main:
            self.folder.write(self.folder.summary, json.dumps(summary, indent=1) + "\n")
            draw_losses(self.folder)
        return summary

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        with contextlib.suppress(RuntimeError):  # no trace is running
            jax.profiler.stop_trace()
        with contextlib.ExitStack() as closing:  # in the opposite order, and each even if another fails
            if self.mirror is not None:
                closing.callback(self.mirror.wait)
            if self.checkpoints and (error is None or jax.process_count() == 1):  # it would wait for the others
                closing.callback(self.checkpoints.close)
            closing.callback(self.loader.close)
            if self.metrics:
                if self.at_end is not None:
                    closing.callback(self.at_end, self.folder, self.loader)
                closing.callback(self.metrics.close)


def rounded_up(count: int) -> int:
    """At least 4, then rounded up by at most a quarter: to 5, 6, 7, 8, 10, 12, 14, 16, 20, …"""
    step = max(1, 2 ** (max(count - 1, 1).bit_length() - 3))
    return max(4, -(-count // step) * step)
