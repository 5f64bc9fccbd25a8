"""Damaged, hostile and shared run folders: nothing is lost, nothing changes silently, every fault is one line."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy

from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.core.files import exclusive, file_sha256
from ping_llm.runs import RunFolder
from ping_llm.runs.trained import load_trained
from ping_llm.runs.weights import save_trained
from ping_llm.training import train
from training_fixtures import folder_of, losses, simulated_rows, tiny_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of two checkpoints, after 2 and 4 steps."""
    folder = tmp_path_factory.mktemp("faults")
    config = tiny_config(
        simulated_rows(folder, 5_000), folder / "runs", max_target_length=128, steps=4, checkpoint_period=2
    )
    train(config)
    return config


@pytest.fixture
def run(trained: Config, tmp_path: Path) -> Config:
    """The same run, to be harmed."""
    shutil.copytree(trained.base_output_directory, tmp_path / "runs")
    return trained.replace(base_output_directory=str(tmp_path / "runs"))


@pytest.fixture
def exported(trained: Config, tmp_path: Path) -> Path:
    save_trained(load_trained(folder_of(trained)), tmp_path / "model", "a card")
    return tmp_path / "model"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def record_file(config: Config, step: int) -> Path:
    return folder_of(config) / "checkpoints" / str(step) / "run" / "metadata"


def change_next_step(file: Path) -> None:
    """One bit of the data state: 4 becomes 5, 2 becomes 3."""
    record = json.loads(file.read_text())
    data = json.loads(record["data"])
    data["next_step"] ^= 1
    file.write_text(json.dumps(record | {"data": json.dumps(data)}))


def flip(file: Path, at: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


class TestDamagedCheckpoints:
    def test_with_none_sound_every_start_refuses_and_nothing_is_touched(self, run: Config) -> None:
        for step in (2, 4):
            record_file(run, step).write_bytes(b"")
        before = contents(folder_of(run))
        for _ in range(2):
            with pytest.raises(PingLlmError, match=r"none of the 2 checkpoints .* another run_name"):
                train(run.replace(steps=6))
            assert contents(folder_of(run)) == before

    def test_a_bit_of_the_data_state_is_noticed(self, run: Config, capsys: pytest.CaptureFixture[str]) -> None:
        before = losses(run)
        change_next_step(record_file(run, 4))
        assert train(run)["resumed_from"] == 2
        assert losses(run) == before
        assert "checkpoint 4 is damaged" in capsys.readouterr().err

    @pytest.mark.parametrize("harm", ["data state", "arrays", "pickle"])
    def test_weights_are_not_read_from_a_damaged_checkpoint(self, run: Config, harm: str) -> None:
        file = largest_file(folder_of(run) / "checkpoints" / "4" / "weights")
        if harm == "data state":
            change_next_step(record_file(run, 4))
        elif harm == "arrays":
            flip(file, file.stat().st_size // 2, 4)
        else:
            file.write_bytes(pickle.dumps({"weights": [1, 2, 3]}))
        with pytest.raises(PingLlmError, match=r"the checkpoint .*checkpoints/4 is damaged"):
            load_trained(folder_of(run))

    def test_a_run_is_not_begun_again_over_its_checkpoints(self, run: Config) -> None:
        before = contents(folder_of(run))
        with pytest.raises(PingLlmError, match="has checkpoints, which enable_checkpointing=false"):
            train(run.replace(enable_checkpointing=False))
        assert contents(folder_of(run)) == before


class TestTwoTrainers:
    def test_the_second_gets_one_line_and_the_first_loses_nothing(self, run: Config) -> None:
        folder = folder_of(run)
        with exclusive(RunFolder.of(run).lock, "the run"):
            before = contents(folder)
            run_file = folder.parent / "again.yml"
            run_file.write_text(run.replace(steps=6).to_yaml())
            command = [sys.executable, "-m", "ping_llm", "train", "--config", str(run_file)]
            second = subprocess.run(command, capture_output=True, text=True, check=False)
            assert second.returncode == 1
            assert len(second.stderr.splitlines()) == 1, second.stderr
            assert "is in use by process " in second.stderr
            assert contents(folder) == before
        assert train(run.replace(steps=6))["resumed_from"] == 4


def test_a_full_disk_is_one_line_and_the_run_resumes_when_there_is_room(run: Config, tmp_path: Path) -> None:
    """The limit on the size of files stands for the disk: checkpoints have larger ones, metrics have not."""
    folder = folder_of(run)
    before = contents(folder / "checkpoints")
    (tmp_path / "run.yml").write_text(run.replace(steps=6).to_yaml())
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
        "from ping_llm.cli.main import main; main()"
    )
    command = [sys.executable, "-c", limited, "train", "--config", str(tmp_path / "run.yml")]
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    stopped = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert stopped.returncode == 1
    assert "Traceback" not in stopped.stderr
    assert stopped.stderr.splitlines()[-1].startswith("error: cannot save to "), stopped.stderr
    assert before.items() <= contents(folder / "checkpoints").items()
    assert train(run.replace(steps=6))["resumed_from"] == 4
    assert len(losses(run)) == 6


def reindexed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


class TestHostileModelFolders:
    @pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/../../b", "", "x\x00y"])
    def test_names_stay_inside(self, exported: Path, name: str) -> None:
        reindexed(exported, lambda index: index["metadata"]["sha256"].update({name: "0" * 64}))
        with pytest.raises(PingLlmError, match=r"index\.json names the file"):
            load_trained(exported)

    @pytest.mark.parametrize(
        "metadata",
        [None, [], {}, {"steps": "4", "sha256": {}}, {"steps": -1, "sha256": {}}, {"steps": 4, "sha256": ["a"]},
         {"steps": True, "sha256": {}}, {"steps": 4, "sha256": {"a": 5}}, {"steps": 4, "sha256": {"a": "../b"}}],
    )  # fmt: skip
    def test_wrong_types_in_the_index_are_named(self, exported: Path, metadata: Any) -> None:
        reindexed(exported, lambda index: index.update(metadata=metadata))
        with pytest.raises(PingLlmError, match=r"index\.json (is not the index of a model|holds .* where a SHA-256)"):
            load_trained(exported)

    @pytest.mark.parametrize("kind", ["pickle", "shape", "dtype", "extra", "huge"])
    def test_other_weights_with_a_right_checksum_are_refused(self, exported: Path, kind: str) -> None:
        (file,) = exported.glob("*.safetensors")
        arrays: dict[str, Any] = {name: np.zeros((2, 2), np.float32) for name in ("embedding", "head.kernel")}
        if kind == "dtype":
            whole = load_trained(exported)
            save_trained(whole, exported, "a card", overwrite=True, dtype="int8")
        elif kind == "extra":
            arrays = dict(safetensors.flax.load_file(file))
            safetensors.flax.save_file(arrays | {"../x": jnp.zeros(1)}, file)
        elif kind == "shape":
            safetensors.numpy.save_file(arrays, file)
        elif kind == "huge":
            header = b'{"embedding":{"dtype":"F32","shape":[1099511627776,1048576],"data_offsets":[0,8]}}'
            file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        else:
            file.write_bytes(pickle.dumps(arrays))
        reindexed(exported, lambda index: index["metadata"]["sha256"].update({file.name: file_sha256(file)}))
        with pytest.raises(PingLlmError, match=r"cannot be read|do not fit|numbers, which no weights are"):
            load_trained(exported)

    @pytest.mark.parametrize(
        "change",
        ["base_num_decoder_layers: 2000000000", "base_emb_dim: 100000000000000000000", "head_dim: 1099511627776"],
    )
    def test_huge_sizes_in_the_configuration_are_refused_at_once(self, exported: Path, change: str) -> None:
        key = change.partition(":")[0]
        lines = (exported / "config.yml").read_text().splitlines()
        (exported / "config.yml").write_text(
            "\n".join(change if line.startswith(f"{key}:") else line for line in lines)
        )
        with pytest.raises(PingLlmError):
            load_trained(exported)
