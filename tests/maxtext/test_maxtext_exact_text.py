"""`dataset_type=text`: MaxText on our text pipeline, with packing and a blend of two sources, changed in the middle.

The weights of the blend change in the middle, too, and steps are passed over.
"""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from maxtext_runs import TINY, copy_run, initialized, run, run_here
from record_batches import digests

from ping_llm.batches.source import BatchSource
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.data.registry import make_eval_loader, make_train_loader
from ping_llm.data.tokenize import tokenize
from ping_llm.integrations.maxtext import iterators

pytest.importorskip("maxtext", reason="MaxText is not installed here; `make test-maxtext` makes an environment with it")

BATCH, STOP, STEPS = 12, 5, 8
"""Twelve sequences can be shared by four hosts and by three. MaxText saves after steps that are multiples of 4."""


@pytest.fixture(scope="module")
def text(c4: Path) -> dict[str, Any]:
    """The keys that decide the batches."""
    train, validation = (f"{c4}/c4/en/3.0.1/c4-{split}.array_record*" for split in ("train", "validation"))
    return {
        "grain_file_type": "arrayrecord",
        "grain_train_files": f"{train},0.7;{validation},0.3",
        "grain_eval_files": validation,
        "tokenizer_path": str(c4 / "tokenizer.default.model"),
        "vocab_size": 32768,
        "max_target_length": 128,
        "eval_steps": 2,
        "mixture_schedule": "4:0.2,0.8",
        "skip_steps": "6:106",
    }


@pytest.fixture
def keys(text: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    return (TINY | text) | {
        "dataset_type": "text",
        "run_name": "text",
        "base_output_directory": str(tmp_path / "runs"),
        "per_device_batch_size": BATCH,
        "num_epoch": -1,
        "packing": True,
        "grain_worker_count": 0,
        "grain_worker_count_eval": 0,
        "checkpoint_period": 4,
        "steps": STEPS,
    }


@pytest.fixture(scope="module")
def expected(text: dict[str, Any]) -> dict[int, list[str]]:
    """What our own trainer would be given, step by step."""
    config = Config(dataset_type="grain", per_device_batch_size=BATCH, grain_worker_count=0).replace(**text)
    with make_train_loader(config) as loader:
        batches = list(islice(loader, STEPS))
    segments = [int(batch["inputs_segmentation"].max()) for batch in batches]
    assert max(segments) > 1  # packed
    return dict(enumerate(map(digests, batches)))


def open_host(
    keys: dict[str, Any], host: int, hosts: int, monkeypatch: pytest.MonkeyPatch, which: str = "train"
) -> iterators.NetworkIterator:
    """The iterator of one of several hosts, with only its part in the array that it gives."""
    rows = BATCH // hosts
    mesh = jax.make_mesh((1,), ("data",))
    sharding = iterators.share_of(mesh, to_load=rows, to_use=rows).sharding
    share = iterators.Share(host, hosts, rows, rows, sharding, rows)
    make = {"train": iterators.make_train_iterator, "eval": iterators.make_eval_iterator}[which]
    with monkeypatch.context() as patch:
        patch.setattr(iterators, "share_of", lambda *_, **__: share)
        return make(initialized(keys), mesh)


def test_four_hosts_become_three_and_then_one_with_other_workers(
    keys: dict[str, Any], expected: dict[int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[int, list[str]] = {}
    state = None
    for hosts, workers, steps in ((4, 0, (0, 1, 2)), (3, 2, (3, 4)), (1, 0, (5, 6, 7))):
        stored = []
        for host in range(hosts):
            iterator = open_host(keys | {"grain_worker_count": workers}, host, hosts, monkeypatch)
            if state is not None:
                iterator.local_iterator.set_state(json.loads(state))
            for step in steps:
                found.setdefault(step, []).extend(digests(next(iterator)))
            stored.append(json.dumps(iterator.local_iterator.get_state()))
            iterator.close()
        assert len(set(stored)) == 1  # MaxText stores one for all
        state = stored[0]
    assert found == expected


@pytest.mark.timeout(900)
def test_four_processes_of_stock_maxtext_become_three_and_then_one(
    keys: dict[str, Any], expected: dict[int, list[str]], tmp_path: Path
) -> None:
    """Processes that find each other and train together, through MaxText's checkpoints: saved after steps 2 and 4."""
    keys |= {"checkpoint_period": 2, "base_emb_dim": 48}  # which four devices can share, and three
    found: dict[int, list[str]] = {}
    for hosts, workers, steps in ((4, 2, 3), (3, 0, 5), (1, 0, STEPS)):
        now = {"per_device_batch_size": BATCH // hosts, "grain_worker_count": workers, "steps": steps}
        if hosts > 1:
            outcome = run(keys | now, tmp_path / str(hosts), processes=hosts, config="base.yml")
        else:
            outcome = run_here(keys | now, tmp_path / str(hosts), config="base.yml")
        assert not found.keys() & outcome.batches.keys()
        assert np.isfinite(list(outcome.losses.values())).all()
        found |= outcome.batches
    assert found == expected


def test_stock_maxtext_resumes_exactly_without_the_workers_it_began_with(
    keys: dict[str, Any], expected: dict[int, list[str]], tmp_path: Path
) -> None:
    begun = keys | {"steps": STOP, "grain_worker_count": 2, "eval_interval": 2}
    first = run(begun, tmp_path / "first", config="base.yml")
    assert first.batches.items() >= {step: expected[step] for step in range(STOP)}.items()
    assert first.said("Completed eval after train step 4")
    second = run_here(copy_run(keys, tmp_path / "copy"), tmp_path / "second", config="base.yml")
    assert second.batches == {step: expected[step] for step in range(STOP, STEPS)}
    assert np.isfinite(list(second.losses.values())).all()


def test_evaluation_text_is_the_same_every_time(
    keys: dict[str, Any], text: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    iterator = open_host(keys, 0, 1, monkeypatch, "eval")
    first = list(map(digests, iterator))
    iterator.reset()
    assert list(map(digests, iterator)) == first
    config = Config(dataset_type="grain", per_device_batch_size=BATCH).replace(**text)
    with make_eval_loader(config) as loader:
        assert list(map(digests, loader)) == first


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attention": "cudnn_flash_jax"}, "ignores where segments end"),
        ({"packing": False}, "dataset_type=text are always packed"),
        ({"grain_file_type": "parquet"}, "reads arrayrecord and tokens"),
        ({"tokenize_train_data": False}, "are grain_file_type=tokens"),
        ({"eval_interval": 5, "grain_eval_files": ""}, "grain_eval_files is empty"),
        ({"expansion_factor_real_data": 0.5}, "resumes on any number of hosts"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_the_reason(keys: dict[str, Any], change: dict[str, Any], reason: str) -> None:
    with pytest.raises(PingLlmError, match=reason):
        initialized(keys | change)


def test_tokenised_documents_are_read_too(
    keys: dict[str, Any], text: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del keys["mixture_schedule"]
    shape = {name: text[name] for name in text if name != "mixture_schedule"}
    shape |= {"grain_train_files": text["grain_eval_files"]}
    tokenize(Config(dataset_type="grain").replace(**shape), tmp_path / "tokens", workers=1)
    shape |= dict.fromkeys(("grain_train_files", "grain_eval_files"), f"{tmp_path}/tokens/*.bin")
    shape |= {"grain_file_type": "tokens"}
    config = Config(dataset_type="grain", per_device_batch_size=BATCH, grain_worker_count=0).replace(**shape)
    for which, make in (("train", make_train_loader), ("eval", make_eval_loader)):
        iterator = open_host(keys | shape | {"tokenize_train_data": False}, 0, 1, monkeypatch, which)
        with make(config) as loader:
            assert [digests(next(iterator)) for _ in range(2)] == [digests(next(loader)) for _ in range(2)]


def test_other_text_is_refused_on_resume(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    state = open_host(keys, 0, 1, monkeypatch).local_iterator.get_state()
    other = open_host(keys | {"add_eos": False}, 0, 1, monkeypatch).local_iterator
    with pytest.raises(PingLlmError, match="the data is not what this run was trained on: add_eos"):
        other.set_state(state)


def test_epochs_end_where_num_epoch_says_with_padding_if_asked_for(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    iterator = open_host(keys | {"num_epoch": 1, "generate_padding_batch_train": True}, 0, 1, monkeypatch)
    local = iterator.local_iterator
    state = local.get_state()["ping_llm_data_state"]
    end = BatchSource(local.loader.spec).sequences_per_epoch // BATCH
    local.set_state({"ping_llm_data_state": state | {"next_step": end - 1}})
    assert [bool(np.asarray(next(iterator)["inputs_segmentation"]).any()) for _ in range(3)] == [True, False, False]
