"""A training run from its beginning, or from its last checkpoint, to its end."""

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ping_llm.batches.device import on_device
from ping_llm.batches.spec import DataState
from ping_llm.config import Config
from ping_llm.core.console import err, progress
from ping_llm.core.errors import PingLlmError
from ping_llm.data import registry as factory
from ping_llm.data.completer import COMPLETER_DATA
from ping_llm.runs.checkpoints import Checkpoints, TrainState, create, laid_out
from ping_llm.runs.devices import batch_sharding, make_mesh, peak_flops
from ping_llm.runs.folder import RunFolder
from ping_llm.runs.metrics import Metrics
from ping_llm.runs.task import task_of
from ping_llm.runs.trained import begin_with, load_trained
from ping_llm.training.processes import failing_together, start_processes
from ping_llm.training.resume import check_unchanged, check_vocabulary, data_state
from ping_llm.training.session import Pace, StopRequest, draw_losses
from ping_llm.training.step import StepValues, make_eval_step, make_train_step, optimizer, rates

AtEnd = Callable[[RunFolder, Any], None]

_STEPS_IN_FLIGHT: Final = 2
"""A step's numbers are read when so many later ones were handed to the device: it always has something to do."""


def train(config: Config, *, at_end: AtEnd | None = None) -> dict[str, Any]:
    """Run until `steps` steps are done, or until asked to stop. Returns what `summary.json` holds.

    `at_end` is called with the folder and the loader when the run ends, however that is: it writes the report.
    """
    start_processes(config)
    with failing_together():
        return _train(config, at_end)


def _train(config: Config, at_end: AtEnd | None) -> dict[str, Any]:
    if not config.run_name:
        config = config.replace(run_name=time.strftime("%Y%m%d-%H%M%S"))
    try:
        run = _Run(config, at_end)
    except BaseException:
        RunFolder.of(config).forget_if_empty()
        raise
    with run:
        run.announce()
        run.loop()
        summary = run.finish()
    if run.mirror is not None:
        run.mirror.finish()
    return summary


class _Run:
    def __init__(self, config: Config, at_end: AtEnd | None) -> None:
        self.config = config
        self.at_end = at_end
        self.folder = RunFolder.of(config)
        self.is_main = jax.process_index() == 0
        self.mirror = self.folder.mirror
        if self.mirror is not None:
            if jax.process_count() > 1:
                raise PingLlmError(
                    f"base_output_directory={config.base_output_directory}: a run of several processes needs a folder "
                    "that all of them see; copy it to the store afterwards"
                )
            self.mirror.pull()
        self.mesh = make_mesh(config)
        self.task = task_of(config)
        self._check_batch()
        factory.check_files(config)
        if self.folder.has_checkpoints:
            check_unchanged(self.folder.config, config)
            check_vocabulary(self.folder.config, config)
        self.checkpoints = self._open_checkpoints()
        change = optimizer(config)
        restored = self.checkpoints and self.checkpoints.restore(laid_out(config, change, self.mesh))
        if restored:
            self.step, self.state, data = restored
        else:
            self.step, self.state, data = 0, self._first_state(change), None
        self.resumed_from = self.step if restored else None
        self.loader = self._open_loader(data)
        self.data_state = self.loader.state()
        self.train_step = make_train_step(self.task, change, config)
        self.eval_step = make_eval_step(task_of(config.replace(quantization="none")))  # as the model will be used
        self.rates = rates(config)
        peak = peak_flops(config)
        self.pace = Pace(self.task.flops_per_token, None if peak is None else peak * jax.device_count())
        self.metrics = Metrics(config, self.folder, self.step, self.task.arithmetic) if self.is_main else None
        self.most_segments = 1
        self.compiled_for = 0
        self.in_flight: deque[tuple[int, StepValues]] = deque()
        self.loss: float | None = None
        self.eval_loss: float | None = None
        self.evaluated_at: int | None = None
        self.stopped_by: int | None = None
        if self.is_main:  # not before: what could not begin leaves a run as it was
            self.folder.write(self.folder.config, config.to_yaml())

    # -- beginning

    def _check_batch(self) -> None:
        sequences = self.config.per_device_batch_size * jax.device_count()
        parts = self.config.gradient_accumulation_steps * jax.device_count()
        if sequences % parts:
            raise PingLlmError(
                f"a batch of {sequences:g} sequences cannot be split over {jax.device_count()} device(s) and "
                f"gradient_accumulation_steps={self.config.gradient_accumulation_steps}"
            )

    def _open_checkpoints(self) -> Checkpoints | None:
        c = self.config
        if not c.enable_checkpointing:
            return None
        return Checkpoints(
            self.folder.checkpoints,
            keep=c.max_num_checkpoints_to_keep,
            keep_best=c.keep_best_checkpoints,
            asynchronous=c.async_checkpointing,
        )

    def _first_state(self, change: optax.GradientTransformation) -> TrainState:
        state = create(self.config, change, self.mesh)
        if not self.config.load_parameters_path:
            return state
        weights = begin_with(load_trained(self.config.load_parameters_path), state.weights)
        average = None if state.average is None else jax.tree.map(jnp.copy, weights)
        return replace(state, weights=weights, average=average)

    def _open_loader(self, data: DataState | None) -> factory.TrainLoader:
        return factory.make_train_loader(
            self.config,
            devices=jax.device_count(),
            host=jax.process_index(),
            hosts=jax.process_count(),
            state=data,
        )

    def announce(self) -> None:
        if not self.is_main:
            return
        c = self.config
        devices = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
        err.print(f"run [bold]{self.folder}[/] on {devices}, {jax.process_count()} process(es)", soft_wrap=True)
        err.print(
            f"model: {self.task.parameters / 1e6:,.1f} M parameters ({self.task.description}, {self.task.arithmetic}",
            soft_wrap=True,
        )
        what = "contexts" if c.dataset_type in COMPLETER_DATA else f"sequences of {c.max_target_length} tokens"
        sequences = int(c.per_device_batch_size * jax.device_count())
        err.print(
            f"batch: {sequences} {what}; {c.steps:,} steps "
            f"of {c.opt_type}, {c.learning_rate_schedule}, learning rate {c.learning_rate:g}",
            soft_wrap=True,
        )
        peak = peak_flops(c)
        known = f"{peak / 1e12:,.0f} TFLOP/s a device" if peak else "unknown for this device (peak_tflops sets it)"
        err.print(f"peak for the utilisation (MFU): {known}", soft_wrap=True)
        if self.resumed_from is not None:
            err.print(f"resumed after {self.resumed_from:,} steps")

    # -- the loop

    def loop(self) -> None:
        sharding = batch_sharding(self.mesh)
        with (
            StopRequest() as stop,
            self.loader,
            on_device(self.loader, sharding) as batches,
            progress("training", total=self.config.steps) as advance,
        ):
            advance(self.step)
            while self.step < self.config.steps:
                self._profile()
                self._one_step(batches)
                advance()
                if self._is_time(self.config.eval_interval):
                    self._evaluate()
                if self._is_time(self.config.checkpoint_period) and self.step < self.config.steps:
                    self._save()
                if stop.agreed(self.step):
                    self.stopped_by = stop.signal
                    break
            if self.step != self.resumed_from:
                self._end()

    def _end(self) -> None:
        self._drain(0)
        if self.config.eval_interval > 0 and self.stopped_by is None and self.evaluated_at != self.step:
            self._evaluate()
        self._save()

    def _one_step(self, batches: Iterator[Any]) -> None:
        asked = time.perf_counter()
        batch = next(batches)
        self.pace.wait(time.perf_counter() - asked)
        most_segments = self._most_segments(self.loader, self.step)
        if most_segments != self.compiled_for:  # compiling is not training time
            self._drain(0)
            self.pace.pause()
            self.compiled_for = most_segments
        self.state, values = self.train_step(self.state, batch, most_segments)
        self.in_flight.append((self.step, values))
        self.step += 1
        self._drain(_STEPS_IN_FLIGHT)

    def _most_segments(self, loader: factory.EvalLoader, step: int) -> int:
        """Rounded up and never less than before: each number is compiled for itself. Plain attention needs none."""
        if self.task.asks_for_segments:
            self.most_segments = max(self.most_segments, rounded_up(loader.max_segments(step)))
        return self.most_segments

    def _is_time(self, period: int) -> bool:
        return period > 0 and self.step % period == 0

    def _drain(self, leave: int) -> None:
        """Read the numbers of finished steps, but of the last few, which the device is still working on."""
        while len(self.in_flight) > leave:
            step, values = self.in_flight.popleft()
            numbers = {name: np.asarray(value).item() for name, value in values.items()}
            self.pace.step(numbers["real_tokens"])
            self.loss = numbers["loss"]
            if self.metrics:
                record = {"step": step, **numbers, "learning_rate": float(self.rates[step]), **self.pace.recent()}
                is_time = (step + 1) % self.config.log_period == 0
                self.metrics.write(record, everywhere=is_time)
                if is_time:
                    self._log(record)
            if not math.isfinite(numbers["loss"]) or not math.isfinite(numbers["grad_norm"]):
                raise PingLlmError(self._broken(step, numbers))

    def _log(self, record: dict[str, Any]) -> None:
        rate, mfu, wait = (record[name] for name in ("real_tokens_per_s", "mfu", "data_wait_fraction"))
        speed = "" if rate is None else f"  {rate:>9,} tokens/s  waiting for data {wait:.1%}"
        speed += "" if mfu is None else f"  MFU {mfu:.1%}"
        err.print(
            f"step {record['step'] + 1:>6}  loss {record['loss']:.4f}  gradient {record['grad_norm']:.3f}{speed}",
            markup=False,
            soft_wrap=True,
        )

    def _broken(self, step: int, numbers: dict[str, Any]) -> str:
        what = "loss" if not math.isfinite(numbers["loss"]) else "gradient norm"
        value = numbers["loss" if what == "loss" else "grad_norm"]
        saved = "no checkpoint was saved before" if self.checkpoints is None else "earlier checkpoints are sound"
        return (
            f"the {what} of step {step} is {value}; {saved}. The batch came from {self._provenance(step)}. Look at it "
            f"with: ping-llm inspect batch --config {self.folder.config} --step {step}. Then lower learning_rate or "
            "gradient_clipping_threshold, or change data_shuffle_seed"
        )

    def _provenance(self, step: int) -> str:
        if self.config.dataset_type != "network" or self.config.network_data_format != "probe_chunks":
            return f"{self.config.dataset_type} data"
        from ping_llm.batches.explain import rows_of_batch

        spec = factory.spec_from_config(self.config, "train", jax.device_count())
        return rows_of_batch(spec, step)

    # -- evaluation and checkpoints

    def _evaluate(self) -> None:
        self._drain(0)
        self.pace.pause()
        config = self.config.replace(grain_worker_count=0, grain_visualization_dir="", grain_debug_mode=False)
        loader = factory.make_eval_loader(
            config, devices=jax.device_count(), host=jax.process_index(), hosts=jax.process_count()
        )
        total: list[Any] = []
        with loader, on_device(loader, batch_sharding(self.mesh)) as batches:
            for number, batch in enumerate(batches):
                total.append(self.eval_step(self.state.best_weights, batch, self._most_segments(loader, number)))
        entropy = sum(float(sums["cross_entropy"]) for sums in total)
        targets = sum(int(sums["targets"]) for sums in total)
        self.eval_loss = entropy / max(1, targets)
        self.evaluated_at = self.step
        if self.metrics:
            record = {"step": self.step, "eval_loss": self.eval_loss, "eval_targets": targets}
            self.metrics.write(record, everywhere=True)
            err.print(f"step {self.step:>6}  evaluation loss {self.eval_loss:.4f} over {targets:,} tokens")

    def _save(self) -> None:
        if self.checkpoints is None:
            return
        self._drain(0)  # nothing is saved that has gone wrong
        self.pace.pause()
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

    # -- end

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
            self.folder.write_summary(summary)
            draw_losses(self.folder.metrics, self.folder.picture)
        return summary

    def __enter__(self) -> "_Run":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        with contextlib.suppress(RuntimeError):  # no trace is running
            jax.profiler.stop_trace()
        if self.metrics:
            self.metrics.close()
            if self.at_end is not None:
                self.at_end(self.folder, self.loader)
        self.loader.close()
        if self.checkpoints and (error is None or jax.process_count() == 1):  # it would wait for the others
            self.checkpoints.close()
        if self.mirror is not None:
            self.mirror.wait()


def rounded_up(count: int) -> int:
    """1 to 8, 10, 12, 14, 16, 20, …: at most a quarter too many."""
    step = max(1, 2 ** (max(count - 1, 1).bit_length() - 3))
    return max(4, -(-count // step) * step)
