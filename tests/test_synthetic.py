"""Backends whose batches are a function of seed and step: random tokens, and the completer's worlds."""

from typing import Any

import numpy as np
import pytest

from backend_fixtures import digests, state_after, take, together
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.data.registry import make_eval_loader, make_train_loader

SYNTHETIC = Config(dataset_type="synthetic", per_device_batch_size=6, max_target_length=128, data_shuffle_seed=3)
WORLDS = Config(dataset_type="worlds", per_device_batch_size=6, data_shuffle_seed=3)


def test_random_tokens_have_segments_shifted_targets_and_little_padding() -> None:
    with make_train_loader(SYNTHETIC) as loader:
        batch, max_segments = next(loader), loader.max_segments(0)
    assert batch["inputs"].shape == (6, 128)
    segment = batch["inputs_segmentation"]
    assert 0 < (segment == 0).mean() < 0.03
    assert segment.max() <= max_segments
    predicts = batch["targets_segmentation"] > 0
    np.testing.assert_array_equal(batch["targets"][:, :-1][predicts[:, :-1]], batch["inputs"][:, 1:][predicts[:, :-1]])


@pytest.mark.parametrize("config", [SYNTHETIC, WORLDS], ids=lambda config: config.dataset_type)
class TestBoth:
    def test_a_batch_is_a_function_of_seed_and_step_and_hosts_share_it(self, config: Config) -> None:
        whole = take(config, 10)
        assert digests(together([take(config, 10, host=host, hosts=2) for host in range(2)])) == digests(whole)
        assert digests(take(config.replace(data_shuffle_seed=4), 1)) != digests(whole[:1])
        assert len(set(digests(whole[:8]))) == 8
        with pytest.raises(PingLlmError, match="cannot be shared evenly"):
            make_train_loader(config, hosts=4)

    def test_training_resumes_and_evaluation_ends(self, config: Config) -> None:
        assert digests(take(config, 2, state_after(config, 3))) == digests(take(config, 5)[3:])
        with make_eval_loader(config.replace(eval_steps=3)) as loader:
            assert len(list(loader)) == 3

    @pytest.mark.parametrize("change", [{"data_shuffle_seed": 1}, {"per_device_batch_size": 8.0}])
    def test_a_state_of_other_settings_is_refused(self, config: Config, change: dict[str, Any]) -> None:
        with pytest.raises(PingLlmError, match="the data is not what this run was trained on"):
            make_train_loader(config.replace(**change), state=state_after(config, 1))


def test_the_seed_of_unseen_worlds_is_another() -> None:
    with make_eval_loader(WORLDS) as loader:
        assert next(loader)["seed"][0] != take(WORLDS, 1)[0]["seed"][0]


def test_a_length_that_changed_is_named() -> None:
    with pytest.raises(PingLlmError, match=r"contexts\.length: 128 then, 64 now"):
        make_train_loader(SYNTHETIC.replace(max_target_length=64), state=state_after(SYNTHETIC, 1))
