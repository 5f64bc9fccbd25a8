"""Training, stopping and resuming through MaxText's own checkpoints, on the same and on other numbers of processes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from maxtext_runs import TINY, Outcome, copy_run, run, run_here

pytest.importorskip("maxtext", reason="MaxText is not installed here; `make test-maxtext` makes an environment with it")

STEPS, STOP = 40, 21
"""MaxText saves after steps that are multiples of the period: 0, 20, 40."""


@pytest.fixture(scope="module")
def keys(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return TINY | {
        "run_name": "resumed",
        "base_output_directory": str(tmp_path_factory.mktemp("resumed")),
        "network_train_files": str(rows),
        "network_eval_files": str(rows),
        "per_device_batch_size": 4,
        "grain_worker_count": 0,
        "grain_worker_count_eval": 0,
        "eval_interval": -1,
        "checkpoint_period": 20,
        "learning_rate": 0.01,
        "learning_rate_schedule_steps": STEPS,
        "steps": STEPS,
    }


@pytest.fixture(scope="module")
def uninterrupted(keys: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_here(keys | {"run_name": "uninterrupted"}, tmp_path_factory.mktemp("uninterrupted"))


@pytest.fixture(scope="module")
def stopped(keys: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The keys of a run of one process that ended after half of its steps. It was evaluated as well."""
    short = keys | {"steps": STOP, "eval_interval": 10, "eval_steps": 2}
    outcome = run_here(short, tmp_path_factory.mktemp("stopped"))
    assert max(outcome.batches) == STOP - 1
    assert outcome.said("Completed eval after train step 20")
    return keys


def went_on(outcome: Outcome, whole: Outcome) -> None:
    """From the stop on, exactly the batches of the uninterrupted run."""
    assert sorted(outcome.batches) == list(range(STOP, STEPS))
    assert outcome.batches == {step: whole.batches[step] for step in outcome.batches}


def losses_of(outcome: Outcome) -> list[float]:
    return [outcome.losses[step] for step in range(STOP, STEPS)]


def test_the_loss_falls_on_packed_batches_with_hardly_any_padding(uninterrupted: Outcome) -> None:
    losses = [uninterrupted.losses[step] for step in range(STEPS)]
    assert np.mean(losses[-5:]) < losses[0] - 0.5
    assert [len(uninterrupted.batches[step]) for step in range(STEPS)] == [4] * STEPS
    assert len({digest for batch in uninterrupted.batches.values() for digest in batch}) == 4 * STEPS


def test_resuming_with_other_workers_is_exact(stopped: dict[str, Any], uninterrupted: Outcome, tmp_path: Path) -> None:
    keys = copy_run(stopped, tmp_path / "copy") | {"grain_worker_count": 2, "grain_per_worker_buffer_size": 2}
    outcome = run(keys, tmp_path / "notes")
    went_on(outcome, uninterrupted)
    assert losses_of(outcome) == losses_of(uninterrupted)


def test_resuming_with_two_processes_instead_of_one_gives_the_same_batches(
    stopped: dict[str, Any], uninterrupted: Outcome, tmp_path: Path
) -> None:
    keys = copy_run(stopped, tmp_path / "copy") | {"per_device_batch_size": 2}
    outcome = run(keys, tmp_path / "notes", processes=2)
    went_on(outcome, uninterrupted)
    np.testing.assert_allclose(losses_of(outcome), losses_of(uninterrupted), rtol=2e-4)


def test_resuming_with_one_process_instead_of_two_gives_the_same_batches(
    keys: dict[str, Any], uninterrupted: Outcome, tmp_path: Path
) -> None:
    keys = keys | {"base_output_directory": str(tmp_path / "runs")}
    first = run(keys | {"per_device_batch_size": 2, "steps": STOP}, tmp_path / "two", processes=2)
    assert first.batches == {step: uninterrupted.batches[step] for step in range(STOP)}
    outcome = run(keys | {"grain_worker_count": 1}, tmp_path / "one")
    went_on(outcome, uninterrupted)
    np.testing.assert_allclose(losses_of(outcome), losses_of(uninterrupted), rtol=2e-4)


def test_one_host_can_load_for_two_and_the_batches_stay_the_same(
    keys: dict[str, Any], uninterrupted: Outcome, tmp_path: Path
) -> None:
    """MaxText trains on the first half of what it loads; the other process gives placeholders."""
    keys = keys | {"base_output_directory": str(tmp_path / "runs"), "expansion_factor_real_data": 2}
    keys |= {"per_device_batch_size": 2, "steps": STOP}
    outcome = run(keys, tmp_path / "notes", processes=2)
    assert outcome.batches == {step: uninterrupted.batches[step] for step in range(STOP)}
    losses = [uninterrupted.losses[step] for step in range(STOP)]
    np.testing.assert_allclose([outcome.losses[step] for step in range(STOP)], losses, rtol=2e-4)
    assert (tmp_path / "runs" / "resumed" / "checkpoints" / "20" / "iter" / "process_0.json").exists()


def test_resuming_with_other_data_is_refused_and_says_what_differs(
    stopped: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = copy_run(stopped, tmp_path / "copy") | {"data_shuffle_seed": 5}
    outcome = run_here(keys, tmp_path / "notes")
    assert outcome.code == 1
    error = "error: the data is not what this run was trained on: seed: 0 then, 5 now"
    assert error in capsys.readouterr().err
    assert not outcome.batches
