"""What MaxText is given: batches that were checked, for as long as it was asked for."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from maxtext_runs import initialized, run_here

from ping_llm.batches.spec import Batch
from ping_llm.core.errors import PingLlmError
from ping_llm.data.synthetic import random_batch
from ping_llm.integrations.maxtext import iterators
from ping_llm.integrations.maxtext.iterators import ARRAYS, check_batch, check_segments, share_of

pytest.importorskip("maxtext", reason="MaxText is not installed here; `make test-maxtext` makes an environment with it")

SIZES = {"sequences": 4, "length": 64, "vocabulary": 267}


def sound_batch(seed: int = 0) -> Batch:
    return random_batch(4, 64, seed=seed)


class TestChecks:
    @given(st.integers(0, 1000))
    def test_a_sound_batch_passes(self, seed: int) -> None:
        check_batch(sound_batch(seed), **SIZES)

    def test_padding_alone_passes(self) -> None:
        check_batch({name: np.zeros((4, 64), dtype=np.int32) for name in ARRAYS}, **SIZES)

    @given(
        st.sampled_from(ARRAYS), st.integers(0, 3), st.integers(0, 63), st.sampled_from([-1, 1, 2, 266, 1000, -(2**31)])
    )
    def test_any_other_number_anywhere_is_refused(self, name: str, sequence: int, position: int, change: int) -> None:
        batch = {key: value.copy() for key, value in sound_batch().items()}
        shown = {key: value.copy() for key, value in batch.items()}
        batch[name][sequence, position] ^= change
        is_only_input = name == "inputs" and 0 <= batch["inputs"][sequence, position] < 267
        first_of_segment = position == 0 or shown["targets_segmentation"][sequence, position - 1] == 0
        if is_only_input and first_of_segment:  # nothing else in the batch says what this token was
            check_batch(batch, **SIZES)
        else:
            with pytest.raises(PingLlmError, match=f"refused.*(sequence {sequence}, position|token|segment)"):
                check_batch(batch, **SIZES)

    @pytest.mark.parametrize(
        ("spoilt", "what"),
        [
            (lambda b: {n: a for n, a in b.items() if n != "targets_position"}, "its arrays are"),
            (lambda b: b | {"inputs": b["inputs"].astype(np.int16)}, r"inputs is int16 \(4, 64\), not int32"),
            (lambda b: b | {"targets": b["targets"][:, :-1]}, r"targets is int32 \(4, 63\), not int32 \(4, 64\)"),
            (lambda b: b | {"targets": b["targets"].tolist()}, "targets is list"),
        ],
    )
    def test_wrong_arrays_are_refused(self, spoilt: Any, what: str) -> None:
        with pytest.raises(PingLlmError, match=what):
            check_batch(spoilt(sound_batch()), **SIZES)

    def test_more_segments_than_the_attention_was_told_of_are_refused(self) -> None:
        batch = sound_batch()
        most = int(batch["inputs_segmentation"].max())
        check_segments(batch, None)
        check_segments(batch, most)
        with pytest.raises(PingLlmError, match=f"has {most} segments.*max_segments_per_seq={most - 1}"):
            check_segments(batch, most - 1)


class TestIterator:
    def make(self, keys: dict[str, Any], which: str = "train") -> iterators.NetworkIterator:
        config = initialized(keys)
        from maxtext.utils import maxtext_utils

        maker = {"train": iterators.make_train_iterator, "eval": iterators.make_eval_iterator}[which]
        return maker(config, maxtext_utils.get_mesh_from_config(config))

    def test_state_goes_through_json_and_back(self, network: dict[str, Any]) -> None:
        first, second = self.make(network), self.make(network)
        for _ in range(3):
            next(first)
        second.local_iterator.set_state(json.loads(json.dumps(first.local_iterator.get_state())))
        expected = next(first)
        for name, array in next(second).items():
            np.testing.assert_array_equal(np.asarray(array), np.asarray(expected[name]))

    def test_a_state_of_other_iterators_is_refused(self, network: dict[str, Any]) -> None:
        with pytest.raises(PingLlmError, match="another dataset_type"):
            self.make(network).local_iterator.set_state({"global_next_index": 8})

    def test_epochs_end_where_num_epoch_says(self, network: dict[str, Any]) -> None:
        one = sum(1 for _ in self.make(network | {"num_epoch": 1}))
        two = sum(1 for _ in self.make(network | {"num_epoch": 2}))
        assert one > 10
        assert 2 * one <= two <= 2 * one + 1

    def test_padding_batches_follow_the_end_when_asked_for(self, network: dict[str, Any]) -> None:
        iterator = self.make(network | {"num_epoch": 1, "generate_padding_batch_train": True})
        state = iterator.local_iterator.get_state()["ping_llm_data_state"]
        end = sum(1 for _ in self.make(network | {"num_epoch": 1}))
        iterator.local_iterator.set_state({"ping_llm_data_state": state | {"next_step": end - 1}})
        assert np.asarray(next(iterator)["inputs_segmentation"]).any()
        for _ in range(2):
            batch = next(iterator)
            assert all(array.shape == (4, 128) and not np.asarray(array).any() for array in batch.values())

    def test_corrupt_rows_that_are_left_out_are_counted_at_the_end(
        self, network: dict[str, Any], rows: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        shutil.copytree(rows, tmp_path / "damaged")
        shard = next((tmp_path / "damaged").glob("train-*.arrayrecord"))
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 0xFF
        shard.write_bytes(data)
        keys = {"network_train_files": str(tmp_path / "damaged"), "network_skip_corrupt_rows": True, "num_epoch": 1}
        assert sum(1 for _ in self.make(network | keys)) > 10
        iterators.close_all()
        assert "1 rows could not be read and were left out" in caplog.text

    def test_unprepared_measurements_train_too(self, network: dict[str, Any], rows: Path) -> None:
        files = {"network_data_format": "network_parquet", "network_train_files": rows.parent / "raw" / "*.parquet"}
        batch = next(self.make(network | files))
        assert np.asarray(batch["inputs_segmentation"]).any()

    def test_evaluation_is_finite_and_the_same_every_time(self, network: dict[str, Any]) -> None:
        iterator = self.make(network, "eval")
        first = [np.asarray(batch["inputs"]) for batch in iterator]
        iterator.reset()
        second = [np.asarray(batch["inputs"]) for batch in iterator]
        assert len(first) > 1
        np.testing.assert_array_equal(first, second)

    def test_padding_follows_evaluation_data_when_asked_for(self, network: dict[str, Any]) -> None:
        keys = network | {"eval_interval": 1, "eval_steps": 1000, "generate_padding_batch_eval": True}
        iterator = self.make(keys, "eval")
        weights = [int(np.asarray(next(iterator)["targets_segmentation"] > 0).sum()) for _ in range(60)]
        assert weights[0] > 0
        assert weights[-1] == 0

    def test_where_maxtext_loads_more_than_it_trains_on_the_rest_is_padding(self, network: dict[str, Any]) -> None:
        """As it does with less than one sequence per device."""
        half = SimpleNamespace(**initialized(network).get_keys() | {"global_batch_size_to_train_on": 2})
        mesh = jax.make_mesh((1,), ("data",))
        batch = next(iterators.make_train_iterator(half, mesh))
        rows = np.asarray(batch["inputs_segmentation"]).any(axis=1).tolist()
        assert rows == [True, True, False, False]

    def test_a_batch_that_cannot_be_shared_evenly_is_refused(self) -> None:
        with pytest.raises(PingLlmError, match="cannot be shared evenly"):
            share_of(jax.make_mesh((1,), ("data",)), to_load=4, to_use=6)

    def test_a_batch_that_is_refused_ends_the_run_with_an_error(
        self,
        network: dict[str, Any],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """MaxText alone would take it for the end of the data, and succeed."""
        expected = iterators.LocalBatches.__next__

        def spoilt(self: iterators.LocalBatches) -> Batch:
            batch = expected(self)
            batch["inputs_position"][2, 5] = 77
            return batch

        monkeypatch.setattr(iterators.LocalBatches, "__next__", spoilt)
        assert run_here(network | {"steps": 3}, tmp_path / "notes").code == 1
        assert "error: a batch was refused before it reached MaxText: positions" in capsys.readouterr().err

    def test_the_graph_of_the_pipeline_is_written(self, network: dict[str, Any], tmp_path: Path) -> None:
        keys = network | {"steps": 3, "grain_visualization_dir": tmp_path / "graph", "grain_debug_mode": True}
        outcome = run_here(keys, tmp_path / "notes")
        assert outcome.code == 0
        assert len(outcome.losses) == 3
        assert (tmp_path / "graph" / "pipeline_graph.svg").read_text().startswith("<svg")
        assert json.loads((tmp_path / "graph" / "pipeline.json").read_text())["batches"] == 3


def test_padding_is_at_most_two_per_cent_of_long_sequences(rows: Path, network: dict[str, Any]) -> None:
    iterator = TestIterator().make(network | {"max_target_length": 1024})
    used = [float(np.mean(np.asarray(next(iterator)["inputs_segmentation"]) > 0)) for _ in range(20)]
    assert np.mean(used) >= 0.98
