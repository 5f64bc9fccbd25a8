"""Training runs, in this process where that is enough and as programs where they are killed or run side by side."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from ping_llm.config import Config, load_config
from ping_llm.core.errors import PingLlmError
from ping_llm.runs import read_metrics
from ping_llm.training import train
from ping_llm.training.step import orthogonalize, scale_by_muon, schedule
from training_fixtures import folder_of, free_port, losses, simulated_rows, steps_done, tiny_config

SUMMARY_KEYS = {
    "final_loss", "eval_loss", "real_tokens_per_s", "mfu", "data_wait_fraction", "steps", "resumed_from",
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    return simulated_rows(folder, 20_000)


@pytest.fixture
def tiny(rows: Path, tmp_path: Path) -> Config:
    """A run of a few seconds."""
    return tiny_config(
        rows,
        tmp_path / "runs",
        network_eval_files=str(rows),
        max_target_length=128,
        steps=12,
        checkpoint_period=4,
        eval_interval=6,
        eval_steps=2,
    )


def constant_rate(config: Config) -> Config:
    """A rate that does not depend on how long the run is to be."""
    return config.replace(learning_rate_schedule="wsd", warmup_steps_fraction=0.0, decay_steps_fraction=0.0)


def eval_losses(config: Config) -> list[tuple[int, float]]:
    return [(r["step"], r["eval_loss"]) for r in read_metrics(folder_of(config) / "metrics.jsonl") if "eval_loss" in r]


class TestRun:
    def test_the_loss_falls_and_the_folder_holds_what_is_promised(self, tiny: Config) -> None:
        config = tiny.replace(steps=40, checkpoint_period=20, eval_interval=20, learning_rate=1e-2)
        config = config.replace(enable_tensorboard=True)
        summary = train(config)
        values = losses(config)
        assert np.mean(values[-5:]) < values[0] - 0.5
        folder = folder_of(config)
        stored = json.loads((folder / "summary.json").read_text())
        assert stored == summary
        assert set(summary) >= SUMMARY_KEYS
        assert summary["steps"] == 40
        assert summary["final_loss"] == values[-1]
        assert summary["resumed_from"] is None
        assert summary["real_tokens_per_s"] > 0
        assert load_config(folder / "config.yml") == config
        assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert list((folder / "tensorboard").iterdir())
        record = read_metrics(folder / "metrics.jsonl")[0]
        assert set(record) >= {"step", "loss", "grad_norm", "learning_rate", "real_tokens_per_s", "data_wait_fraction"}

    def test_evaluation_is_the_same_every_time(self, tiny: Config) -> None:
        config = tiny.replace(steps=4, eval_interval=1, learning_rate=1e-30, adam_weight_decay=0.0)
        train(config)
        values = [loss for _, loss in eval_losses(config)]
        assert len(values) == 4
        assert len(set(values)) == 1

    @pytest.mark.slow
    def test_evaluation_is_bf16_whatever_training_is(self, tiny: Config) -> None:
        config = tiny.replace(dtype="bfloat16", steps=1, eval_interval=1, learning_rate=1e-30, adam_weight_decay=0.0)
        runs = [config.replace(run_name=kind, quantization=kind) for kind in ("none", "fp8")]
        for run in runs:
            train(run)
        assert losses(runs[0]) != losses(runs[1])
        assert eval_losses(runs[0]) == eval_losses(runs[1])

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "change",
        [
            {"opt_type": "muon", "learning_rate_schedule": "wsd"},
            {"gradient_clipping_threshold": 0.0, "z_loss_multiplier": 1e-4, "final_logits_soft_cap": 30.0},
            {"dtype": "bfloat16", "remat_policy": "full"},
            {"dataset_type": "synthetic", "network_eval_files": "x"},
        ],
        ids=["muon", "loss", "bfloat16", "synthetic"],
    )
    def test_the_other_settings_train_too(self, tiny: Config, change: dict[str, Any]) -> None:
        config = tiny.replace(steps=6, eval_interval=3, checkpoint_period=100, **change)
        summary = train(config)
        assert np.isfinite(summary["eval_loss"])
        again = train(config)
        assert again == summary, "a finished run has nothing left to do"

    @pytest.mark.slow
    def test_accumulated_gradients_give_the_losses_of_the_whole_batch(self, tiny: Config) -> None:
        whole, parts = tiny.replace(run_name="whole"), tiny.replace(run_name="parts", gradient_accumulation_steps=4)
        train(whole)
        train(parts)
        np.testing.assert_allclose(losses(whole), losses(parts), rtol=1e-5)

    def test_a_profile_is_written_for_the_steps_asked_for(self, tiny: Config) -> None:
        train(tiny.replace(steps=4, eval_interval=-1, profile_steps="1:3"))
        assert list(folder_of(tiny).glob("profile/**/*.xplane.pb"))

    def test_wandb_gets_the_configuration_and_one_record_in_a_log_period(
        self, tiny: Config, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With a stand-in for the package, which is an extra; the real one was seen to take the same calls."""
        calls: list[tuple[str, Any]] = []

        class Run:
            def log(self, values: dict[str, Any], step: int) -> None:
                calls.append(("log", step))

            def finish(self) -> None:
                calls.append(("finish", None))

        def init(**settings: Any) -> Run:
            calls.append(("init", settings))
            return Run()

        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
        train(tiny.replace(steps=6, eval_interval=-1, wandb_mode="offline", log_period=3))
        (_, settings), *logged, last = calls
        assert settings["mode"] == "offline"
        assert (settings["project"], settings["name"]) == (tiny.project, "tiny")
        assert settings["config"]["base_emb_dim"] == 32
        assert logged == [("log", 2), ("log", 5)]
        assert last == ("finish", None)


class TestResume:
    @pytest.mark.slow
    def test_a_longer_run_continues_where_the_shorter_ended(self, tiny: Config) -> None:
        constant = constant_rate(tiny)
        whole = constant.replace(run_name="whole")
        train(whole)
        train(constant.replace(steps=7))
        summary = train(constant)
        assert summary["resumed_from"] == 7
        assert losses(constant) == losses(whole)
        assert set(eval_losses(constant)) - set(eval_losses(whole)) == {eval_losses(constant)[1]}, "and the one at 7"

    @pytest.mark.slow
    @pytest.mark.parametrize("harm", ["truncate", "flip", "remove"])
    def test_a_damaged_checkpoint_falls_back_loudly_to_the_one_before(
        self, tiny: Config, harm: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        train(tiny)
        before = losses(tiny)
        newest = folder_of(tiny) / "checkpoints" / "12"
        file = max((newest / "weights").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 0x10
        if harm == "remove":
            file.unlink()
        else:
            file.write_bytes(bytes(data) if harm == "flip" else bytes(data[: len(data) // 2]))
        summary = train(tiny)
        assert summary["resumed_from"] == 8
        assert losses(tiny) == before
        assert "checkpoint 12 is damaged" in capsys.readouterr().err
        assert (folder_of(tiny) / "damaged-checkpoints" / "12").is_dir()

    def test_with_no_sound_checkpoint_left_it_does_not_silently_begin_again(self, tiny: Config) -> None:
        train(tiny.replace(steps=2))
        for file in (folder_of(tiny) / "checkpoints").glob("*/weights/**/*"):
            if file.is_file():
                file.write_bytes(b"")
        with pytest.raises(PingLlmError, match="none of the 1 checkpoints"):
            train(tiny)

    def test_another_model_is_refused_and_the_run_left_as_it_was(self, tiny: Config, rows: Path) -> None:
        tiny = tiny.replace(completer_identity=8)
        train(tiny.replace(steps=2))
        raw = str(rows.parent / "raw")
        for changes, message in (
            ({"base_emb_dim": 64}, "base_emb_dim: 32 then, 64 now"),
            ({"average_decay": 0.9}, "average_decay: 0.0 then, 0.9 now"),
            ({"dataset_type": "worlds"}, "dataset_type: network then, worlds now"),
            ({"dataset_type": "measured", "network_train_files": raw}, "dataset_type: network then, measured now"),
        ):
            with pytest.raises(PingLlmError, match=f"{message}.*Use the same settings to resume it"):
                train(tiny.replace(**changes))
        assert not (folder_of(tiny) / "damaged-checkpoints").exists()
        assert train(tiny.replace(steps=3))["resumed_from"] == 2

    def test_what_could_not_begin_leaves_no_trace(self, tiny: Config) -> None:
        with pytest.raises(PingLlmError, match="no such folder"):
            train(tiny.replace(network_train_files="/nowhere", base_emb_dim=64))
        assert not (folder_of(tiny) / "config.yml").exists()
        assert train(tiny.replace(steps=2))["resumed_from"] is None
        with pytest.raises(PingLlmError, match="seed: 0 then, 5 now"):
            train(tiny.replace(data_shuffle_seed=5))
        assert load_config(folder_of(tiny) / "config.yml").data_shuffle_seed == 0

    def test_other_data_is_refused_unless_allowed(self, tiny: Config) -> None:
        train(tiny.replace(steps=2))
        other = tiny.replace(data_shuffle_seed=5)
        with pytest.raises(PingLlmError, match="seed: 0 then, 5 now"):
            train(other)
        assert train(other.replace(allow_data_change=True))["resumed_from"] == 2

    @pytest.mark.slow
    def test_the_best_checkpoint_is_kept_beside_the_newest(self, tiny: Config) -> None:
        config = tiny.replace(eval_interval=2, checkpoint_period=2, max_num_checkpoints_to_keep=1, learning_rate=0.5)
        train(config)
        by_loss = sorted((loss, step) for step, loss in eval_losses(config))
        kept = {int(path.name) for path in (folder_of(config) / "checkpoints").iterdir()}
        assert kept == {12, by_loss[0][1]}


class TestCompleter:
    @pytest.fixture
    def worlds(self, tiny: Config) -> Config:
        return tiny.replace(
            dataset_type="worlds",
            worlds_context=16,
            worlds_questions=8,
            worlds_most_nodes=12,
            completer_identity=8,
            average_decay=0.9,
            eval_steps=4,
        )

    @pytest.mark.slow
    def test_worlds_train_the_completer_and_an_average_of_its_weights_which_resume_exactly(
        self, worlds: Config
    ) -> None:
        """One test: compiling its steps, which make the worlds, takes 35 s of CPU."""
        long = worlds.replace(steps=60, per_device_batch_size=16, eval_interval=20, learning_rate=1e-2)
        whole = constant_rate(long).replace(run_name="whole")
        train(whole)
        first, *_, last = (loss for _, loss in eval_losses(whole))
        assert last < first - 0.05
        assert np.isfinite(losses(whole)).all()
        part = whole.replace(run_name="part")
        train(part.replace(steps=17))
        assert train(part)["resumed_from"] == 17
        assert losses(part) == losses(whole)
        assert eval_losses(part)[-1] == eval_losses(whole)[-1]

    def test_an_impossible_completer_is_refused_in_one_line(self, worlds: Config) -> None:
        with pytest.raises(PingLlmError, match="two identities of 99 leave nothing of a width of 32"):
            train(worlds.replace(completer_identity=99))


def test_a_loss_that_is_not_finite_stops_the_run_with_the_batch_and_how_to_see_it(tiny: Config) -> None:
    broken = tiny.replace(learning_rate=1e30, gradient_clipping_threshold=0.0)
    with pytest.raises(PingLlmError) as caught:
        train(broken)
    message = str(caught.value)
    assert "of step 1 is nan" in message
    assert "rows of" in message
    command = message.split("with: ping-llm ")[1].split(". Then")[0].split()
    shown = run_program(*command, "--json")
    assert json.loads(shown.stdout)["step"] == 1
    checkpoints = list((folder_of(tiny) / "checkpoints").glob("[0-9]*"))
    assert not checkpoints, "nothing broken is saved"


@pytest.mark.parametrize(("name", "halfway"), [("cosine", 0.55), ("wsd", 1.0)])
def test_schedules_rise_hold_or_bend_and_fall(name: str, halfway: float) -> None:
    config = Config(steps=1000, learning_rate=1.0, learning_rate_schedule=name, warmup_steps_fraction=0.1)
    rate = schedule(config)
    assert float(rate(0)) < 0.02
    assert float(rate(100)) == pytest.approx(1.0)
    assert float(rate(1000)) == pytest.approx(0.1)
    assert float(rate(550)) == pytest.approx(halfway, abs=0.01)


def test_muon_makes_updates_orthogonal_alone_or_together() -> None:
    random = jax.random.normal(jax.random.key(0), (3, 24, 60))
    for matrices in (random, random.mT):
        for matrix in orthogonalize(matrices):
            values = np.linalg.svd(np.asarray(matrix), compute_uv=False)
            assert values.min() > 0.6
            assert values.max() < 1.3
    together, alone = orthogonalize(random)[1], orthogonalize(random[1:2])[0]
    np.testing.assert_allclose(together, alone, atol=0.02)


def test_muon_begins_as_the_one_of_optax_does_with_updates_as_large_as_those_of_adam() -> None:
    keys = zip("ab", ((32, 96), (96, 32)), strict=True)
    gradients = {name: jax.random.normal(jax.random.key(ord(name)), shape) for name, shape in keys}
    ours, theirs = scale_by_muon(0.95), optax.contrib.muon(1.0, consistent_rms=0.2)
    update, _ = ours.update(gradients, ours.init(gradients))
    expected, _ = theirs.update(gradients, theirs.init(gradients), gradients)
    for name, value in update.items():
        np.testing.assert_allclose(value, -expected[name], atol=2e-3)
        assert float(jnp.sqrt(jnp.mean(value**2))) == pytest.approx(0.2, rel=0.2)


# -- programs


def run_program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ping_llm", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=240,
    )


def start_program(config: Config, *more: str, **environment: str) -> "subprocess.Popen[str]":
    file = folder_of(config).with_suffix(".yml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(config.to_yaml())
    return subprocess.Popen(
        [sys.executable, "-m", "ping_llm", "train", "--config", str(file), "--json", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_after_kill_minus_nine_every_loss_is_bit_for_bit_that_of_a_run_never_killed(tiny: Config) -> None:
    config = tiny.replace(steps=60, checkpoint_period=5, eval_interval=20, grain_worker_count=1)
    whole = config.replace(run_name="whole")
    train(whole)
    for moment in (7, 31):
        process = start_program(config)
        wait_for(lambda moment=moment: steps_done(config) >= moment, process)  # type: ignore[misc]
        process.kill()
        process.communicate()
    process = start_program(config)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert json.loads(output.splitlines()[-1])["resumed_from"] >= 5
    assert losses(config) == losses(whole)
    assert eval_losses(config) == eval_losses(whole)


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_saves_ends_cleanly_and_the_same_command_resumes(
    tiny: Config, sent: signal.Signals, code: int
) -> None:
    config = tiny.replace(steps=100_000, checkpoint_period=100_000, eval_interval=-1, grain_worker_count=1)
    process = start_program(config)
    wait_for(lambda: steps_done(config) >= 3, process)
    process.send_signal(sent)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    summary = json.loads(output.splitlines()[-1])
    assert not summary["complete"]
    assert (folder_of(config) / "checkpoints" / str(summary["steps"])).is_dir()
    resumed = train(config.replace(steps=summary["steps"] + 2))
    assert resumed["resumed_from"] == summary["steps"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "tolerance"),
    [({}, 1e-5), ({"dtype": "bfloat16", "quantization": "fp8"}, 5e-3)],
    ids=["float32", "fp8"],
)
def test_two_processes_have_the_losses_of_one_and_one_resumes_from_two(
    tiny: Config, keys: dict[str, Any], tolerance: float
) -> None:
    one = constant_rate(tiny).replace(run_name="one", steps=10, grain_worker_count=1, **keys)
    train(one)
    two = one.replace(run_name="two")
    port = free_port()

    def start(index: int) -> "subprocess.Popen[str]":
        return start_program(
            two.replace(distributed=True, ici_fsdp_parallelism=2),
            "--batch-size=4",
            "steps=6",
            JAX_COORDINATOR_ADDRESS=f"localhost:{port}",
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(index),
            JAX_CPU_ENABLE_ASYNC_DISPATCH="false",
            JAX_PLATFORMS="cpu",
        )

    for process in [start(index) for index in range(2)]:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    assert train(two)["resumed_from"] == 6
    np.testing.assert_allclose(losses(two), losses(one), rtol=tolerance)
    np.testing.assert_allclose(np.array(eval_losses(two)), np.array(eval_losses(one)), rtol=tolerance)
