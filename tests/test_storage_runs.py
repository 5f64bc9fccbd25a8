"""A run whose folder is in an object store: any machine can resume it, and its model can be loaded from there."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.runs import read_metrics
from ping_llm.runs.trained import load_trained
from ping_llm.storage import Location
from ping_llm.storage.cache import model_folder, work_folder
from ping_llm.storage.mirror import STATE, Mirror, fetch
from ping_llm.training import train
from storage_fixtures import S3Server, bucket, s3, s3_server, slow, status
from training_fixtures import simulated_rows, tiny_config

__all__ = ["bucket", "s3", "s3_server"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_rows(tmp_path_factory.mktemp("training"), 10_000)


def config_of(rows: Path, runs: object, **changes: Any) -> Config:
    values = {"max_target_length": 128, "steps": 6, "checkpoint_period": 2, "max_num_checkpoints_to_keep": 2}
    constant = {"learning_rate_schedule": "wsd", "warmup_steps_fraction": 0.0, "decay_steps_fraction": 0.0}
    return tiny_config(rows, Path("unused"), base_output_directory=str(runs), **values | constant | changes)


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]


@pytest.mark.slow
def test_a_fresh_machine_resumes_the_run_and_the_model_is_loaded_from_the_store(
    rows: Path, bucket: Location, tmp_path: Path
) -> None:
    whole = config_of(rows, tmp_path / "runs")
    train(whole)

    config = config_of(rows, bucket / "runs")
    remote = bucket / "runs" / config.project / config.run_name
    train(config.replace(steps=3))
    shutil.rmtree(work_folder(remote))  # another machine
    summary = train(config)
    assert summary["resumed_from"] == 3
    assert summary["run"] == str(remote)
    folder = tmp_path / "runs" / whole.project / whole.run_name
    assert losses(work_folder(remote)) == losses(folder)
    steps = {file.relative_to(remote).split("/")[1] for file in (remote / "checkpoints").list(recursive=True)}
    assert steps == {"4", "6"}, "what the run deleted is deleted in the store"
    assert json.loads((remote / "summary.json").read_text())["complete"]

    there, here = load_trained(str(remote)), load_trained(folder)
    assert there.steps == here.steps == 6
    for one, other in zip(_leaves(there.weights), _leaves(here.weights), strict=True):
        assert np.array_equal(one, other)
    assert load_trained(Path(str(remote))).steps == 6, "as the command line hands it over"
    assert {p.name for p in (model_folder(remote) / "checkpoints").iterdir()} == {"6"}, "only what is needed"


def _leaves(tree: Any) -> list[Any]:
    import jax

    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def write(folder: Path, step: int, content: bytes = b"weights") -> None:
    (folder / "checkpoints" / str(step) / "weights").mkdir(parents=True)
    (folder / "checkpoints" / str(step) / "weights" / "data").write_bytes(content)
    (folder / "metrics.jsonl").write_text(f"{step}\n")


class TestMirror:
    def test_copies_what_is_new_and_nothing_twice(self, s3: S3Server, bucket: Location, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        mirror = Mirror(folder, bucket)
        write(folder, 10)
        mirror.finish()
        write(folder, 20)
        s3.requests.clear()
        mirror.finish()
        assert s3.count("PUT", "checkpoints/10") == 0
        assert s3.count("PUT", "checkpoints/20") == 1
        assert s3.count("PUT", "metrics.jsonl") == 1

    def test_leaves_out_what_is_not_finished(self, bucket: Location, tmp_path: Path) -> None:
        write(tmp_path / "run", 10)
        (tmp_path / "run/checkpoints/20.orbax-checkpoint-tmp-7").mkdir()
        (tmp_path / "run/checkpoints/20.orbax-checkpoint-tmp-7/data").write_bytes(b"half")
        (tmp_path / "run/.config.yml.7.tmp").write_bytes(b"half")
        Mirror(tmp_path / "run", bucket).finish()
        names = {file.relative_to(bucket) for file in bucket.list(recursive=True)}
        assert names == {"checkpoints/10/weights/data", "metrics.jsonl", STATE}

    def test_an_interrupted_copy_leaves_the_one_before(self, s3: S3Server, bucket: Location, tmp_path: Path) -> None:
        mirror = Mirror(tmp_path / "run", bucket)
        write(tmp_path / "run", 10)
        mirror.finish()
        write(tmp_path / "run", 20)
        shutil.rmtree(tmp_path / "run/checkpoints/10")
        s3.fail(status(503), times=99, method="PUT", key="checkpoints/20")
        with pytest.raises(PingLlmError, match=r"503.*All is saved in .*run; the same command tries again"):
            mirror.finish()
        Mirror(tmp_path / "elsewhere", bucket).pull()
        assert (tmp_path / "elsewhere/checkpoints/10/weights/data").read_bytes() == b"weights"

    def test_the_further_of_two_copies_wins(self, bucket: Location, tmp_path: Path) -> None:
        write(tmp_path / "here", 20, b"here")
        write(tmp_path / "there", 10, b"there")
        Mirror(tmp_path / "there", bucket).finish()
        Mirror(tmp_path / "here", bucket).pull()
        assert (tmp_path / "here/checkpoints/20/weights/data").read_bytes() == b"here"
        write(tmp_path / "there", 30, b"there")
        Mirror(tmp_path / "there", bucket).finish()
        Mirror(tmp_path / "here", bucket).pull()
        assert (tmp_path / "here/checkpoints/30/weights/data").read_bytes() == b"there"
        assert not (tmp_path / "here/checkpoints/20").exists()

    def test_a_damaged_copy_is_not_taken(self, bucket: Location, tmp_path: Path) -> None:
        write(tmp_path / "run", 10)
        Mirror(tmp_path / "run", bucket).finish()
        (bucket / "checkpoints/10/weights/data").write_bytes(b"WEIGHTS")
        with pytest.raises(PingLlmError, match="damaged"):
            Mirror(tmp_path / "new", bucket).pull()
        assert not (tmp_path / "new").exists()

    def test_training_does_not_wait_for_it_and_its_failure_is_only_a_warning(
        self, s3: S3Server, bucket: Location, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        mirror = Mirror(tmp_path / "run", bucket)
        s3.fail(slow(0.3), method="PUT")
        s3.fail(status(403), times=99, method="PUT")
        mirror.push_soon(10)
        assert any(thread.name == "mirror" for thread in threading.enumerate()), "waits for the checkpoint"
        write(tmp_path / "run", 10)
        mirror.push_soon(10)
        mirror.wait()
        assert "warning: the run could not be copied" in capsys.readouterr().err
        s3.heal()
        mirror.finish()
        assert (bucket / STATE).exists()

    def test_a_checkpoint_that_appears_or_goes_during_a_copy_is_not_named(
        self, s3: S3Server, bucket: Location, tmp_path: Path
    ) -> None:
        folder = tmp_path / "run"
        write(folder, 10)
        (folder / "checkpoints/10/weights/more").write_bytes(b"of the checkpoint that goes")
        write(folder, 20)

        def meanwhile(environ: Any, start: Any, server: Any) -> Any:
            shutil.rmtree(folder / "checkpoints" / "10")
            write(folder, 30)
            return server(environ, start)

        s3.fail(meanwhile, method="PUT", key="checkpoints/10/weights/data")
        Mirror(folder, bucket, copies_at_once=1).finish()
        state = json.loads((bucket / STATE).read_text())
        assert state["step"] == 20
        assert set(state["files"]) == {"checkpoints/20/weights/data", "metrics.jsonl"}

    def test_loading_a_model_leaves_a_run_that_is_further_alone(self, bucket: Location) -> None:
        folder = work_folder(bucket)
        write(folder, 10)
        Mirror(folder, bucket).finish()
        write(folder, 20)
        assert (fetch(bucket) / "checkpoints/10/weights/data").exists()
        assert (folder / "checkpoints/20/weights/data").exists()

    def test_a_folder_of_model_files_is_fetched_whole(self, bucket: Location) -> None:
        (bucket / "model.safetensors").write_bytes(b"x")
        (bucket / "config.yml").write_bytes(b"y")
        assert {p.name for p in fetch(bucket).iterdir()} == {"model.safetensors", "config.yml"}

    def test_nothing_there_is_said(self, bucket: Location) -> None:
        with pytest.raises(PingLlmError, match="no such folder, or an empty one"):
            load_trained(str(bucket / "nothing"))
