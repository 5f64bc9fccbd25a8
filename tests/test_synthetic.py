import numpy as np
import pytest

from ping_llm.core.errors import PingLlmError
from ping_llm.data.synthetic import SyntheticLoader, SyntheticSettings

SETTINGS = SyntheticSettings(global_batch_size=6, length=128, seed=3)


def test_batches_have_segments_shifted_targets_and_little_padding() -> None:
    batch = next(SyntheticLoader(SETTINGS))
    assert batch["inputs"].shape == (6, 128)
    segment = batch["inputs_segmentation"]
    assert 0 < (segment == 0).mean() < 0.03
    assert segment.max() <= SyntheticLoader(SETTINGS).most_segments(0)
    predicts = batch["targets_segmentation"] > 0
    np.testing.assert_array_equal(batch["targets"][:, :-1][predicts[:, :-1]], batch["inputs"][:, 1:][predicts[:, :-1]])


def test_a_batch_is_a_function_of_seed_and_step_and_hosts_share_it() -> None:
    whole = [batch["inputs"] for _, batch in zip(range(10), SyntheticLoader(SETTINGS), strict=False)]
    halves = [SyntheticLoader(SETTINGS, host=host, hosts=2) for host in range(2)]
    for batch in whole:
        np.testing.assert_array_equal(batch, np.concatenate([next(half)["inputs"] for half in halves]))
    other = next(SyntheticLoader(SyntheticSettings(global_batch_size=6, length=128, seed=4)))
    assert not np.array_equal(other["inputs"], whole[0])


def test_it_goes_on_from_a_state_and_ends_where_it_is_told() -> None:
    loader = SyntheticLoader(SETTINGS, last_step=4)
    seen = [next(loader)["inputs"] for _ in range(3)]
    resumed = [batch["inputs"] for batch in SyntheticLoader(SETTINGS, state=loader.state(), last_step=4)]
    assert len(resumed) == 2
    assert not np.array_equal(seen[-1], resumed[0])
    np.testing.assert_array_equal(resumed[0], next(loader)["inputs"])


def test_a_state_of_other_settings_and_uneven_hosts_are_refused() -> None:
    other = SyntheticSettings(global_batch_size=6, length=64)
    with pytest.raises(PingLlmError, match=r"contexts\.length: 64 then, 128 now"):
        SyntheticLoader(SETTINGS, state=SyntheticLoader(other).state())
    with pytest.raises(PingLlmError, match="cannot be shared evenly"):
        SyntheticLoader(SETTINGS, hosts=4)
