"""ArrayRecord text: the same batches however they are delivered, exact after any restart, in any blend."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from backend_fixtures import (
    BOS,
    EOS,
    digests,
    documents_of,
    state_after,
    take,
    text_config,
    text_of,
    texts,
    together,
    write_files,
)
from ping_llm.batches.mixture import Mixture
from ping_llm.batches.source import BatchSource
from ping_llm.batches.spec import Batch
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.data.documents import Documents
from ping_llm.data.grain import text_spec
from ping_llm.data.registry import make_eval_loader, make_train_loader
from ping_llm.data.text import TextSpec
from ping_llm.data.tokenize import tokenize

pytest.importorskip("tiktoken", reason="the package tiktoken is not installed")

DOCUMENTS = 1500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    all_of_them = texts(DOCUMENTS)
    write_files(folder / "a", "arrayrecord", [all_of_them[:400], all_of_them[400:]])
    write_files(folder / "b", "arrayrecord", [texts(300, seed=1)])
    write_files(folder / "c", "arrayrecord", [texts(300, seed=2)])
    return folder


def config_of(folder: Path, **changes: Any) -> Config:
    return text_config(folder, **{"grain_train_files": f"{folder}/a/*.arrayrecord"} | changes)


def batches_per_epoch(config: Config) -> int:
    return BatchSource(text_spec(config)).batches_per_epoch


def tokens_of(batches: Sequence[Batch]) -> Counter[int]:
    return Counter(np.concatenate([b["inputs"][b["inputs_segmentation"] > 0] for b in batches]).tolist())


def tokens_in(documents: Sequence[str]) -> Counter[int]:
    return Counter("".join(documents).encode()) + Counter({BOS: len(documents), EOS: len(documents)})


class TestSameBatches:
    @pytest.mark.parametrize("hosts", [2, 4, 8])
    def test_for_any_number_of_hosts(self, folder: Path, hosts: int) -> None:
        config = config_of(folder)
        parts = [take(config, 6, host=host, hosts=hosts) for host in range(hosts)]
        assert digests(together(parts)) == digests(take(config, 6))

    def test_made_alone_and_backward(self, folder: Path) -> None:
        config = config_of(folder)
        source = BatchSource(text_spec(config))
        backward = [source[step] for step in (301, 40, 5, 4, 0)]
        forward = take(config, 302)
        assert digests(backward) == digests([forward[step] for step in (301, 40, 5, 4, 0)])

    def test_other_seeds_and_steps_give_other_batches(self, folder: Path) -> None:
        batches = take(config_of(folder), 8) + take(config_of(folder, data_shuffle_seed=1), 8)
        assert len(set(digests(batches))) == 16


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_worker_processes_give_the_same_batches(folder: Path, workers: int) -> None:
    config = config_of(folder)
    assert digests(take(config.replace(grain_worker_count=workers), 12)) == digests(take(config, 12))


class TestEpoch:
    def test_has_every_token_of_every_document_once_and_the_next_one_another_order(self, folder: Path) -> None:
        config = config_of(folder, per_device_batch_size=1)
        sequences = batches_per_epoch(config)
        both = take(config, 2 * sequences)
        first, second = both[:sequences], both[sequences:]
        assert tokens_of(first) == tokens_of(second) == tokens_in(texts(DOCUMENTS))
        assert documents_of(first)[:50] != documents_of(second)[:50]
        assert np.mean([batch["inputs_segmentation"] == 0 for batch in both]) < 0.01

    def test_has_the_batches_of_its_token_files(self, folder: Path, tmp_path: Path) -> None:
        config = config_of(folder, per_device_batch_size=1)
        tokenize(config, tmp_path / "tokens", workers=1)
        tokens = config.replace(
            grain_file_type="tokens", grain_train_files=f"{tmp_path}/tokens/*.bin", vocab_size=1000, tokenizer_path=""
        )
        steps = batches_per_epoch(config)
        assert digests(take(config, steps)) == digests(take(tokens, steps))

    def test_without_shuffling_has_the_documents_in_the_order_of_their_files(self, folder: Path) -> None:
        config = config_of(folder, enable_data_shuffling=False, num_epoch=1)
        batches = take(config, batches_per_epoch(config))
        assert text_of(batches) == "".join(texts(DOCUMENTS))

    def test_leaves_out_the_documents_that_a_file_names(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "bad.txt").write_text("part-001.arrayrecord 7\n")
        config = config_of(folder, skip_documents=str(tmp_path / "bad.txt"), per_device_batch_size=1)
        batches = take(config, batches_per_epoch(config))
        assert tokens_in(texts(DOCUMENTS)) - tokens_of(batches) == tokens_in([texts(DOCUMENTS)[407]])

    def test_after_the_last_epoch_come_batches_of_padding(self, folder: Path) -> None:
        config = config_of(folder, num_epoch=1)
        batches = batches_per_epoch(config)
        found = take(config, batches + 3)
        assert (found[0]["inputs_segmentation"] > 0).any()
        assert not any((batch["inputs_segmentation"] > 0).any() for batch in found[batches:])

    def test_a_single_document_is_enough(self, tmp_path: Path) -> None:
        write_files(tmp_path / "a", "arrayrecord", [["<only> this"]])
        assert tokens_of(take(config_of(tmp_path, per_device_batch_size=2), 3)) == tokens_in(3 * ["<only> this"])


class TestLengths:
    """What is kept of each file: how many tokens its documents have."""

    def kept(self, folder: Path) -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in sorted(folder.rglob("*.npy"))}

    def test_are_found_out_once_for_a_file_and_a_tokenizer(self, folder: Path, tmp_path: Path) -> None:
        config = config_of(folder, data_cache_dir=str(tmp_path))
        expected = digests(take(config, 3))
        before = self.kept(tmp_path)
        assert len(before) == 2
        assert digests(take(config, 3)) == expected
        assert self.kept(tmp_path) == before
        take(config.replace(add_eos=False), 1)
        assert len(self.kept(tmp_path)) == 4

    def test_are_the_same_from_worker_processes(self, tmp_path: Path) -> None:
        pattern = write_files(tmp_path / "many", "arrayrecord", [texts(9000, mean=5), texts(10, seed=1)])
        config = text_config(tmp_path, grain_train_files=pattern)
        found = []
        for workers in (0, 1):
            text_spec(config.replace(grain_worker_count=workers, data_cache_dir=str(tmp_path / str(workers))))
            found.append([np.load(file).tolist() for file in self.kept(tmp_path / str(workers))])
        assert found[0] == found[1]

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: b"",
            lambda data: data[:-7],
            lambda data: data.replace(b"(1100,)", b"(1101,)").replace(b"(400,)", b"(401,)"),
            lambda data: data.replace(b"(", b"'"),
            lambda data: data.replace(b"<u4", b"<i4"),
            lambda data: data.replace(b"<u4", b"|O8"),
        ],
    )
    def test_are_found_out_again_if_they_are_damaged(self, folder: Path, tmp_path: Path, damage: Any) -> None:
        config = config_of(folder, data_cache_dir=str(tmp_path))
        expected = digests(take(config, 3))
        before = self.kept(tmp_path)
        for file in before:
            file.write_bytes(damage(file.read_bytes()))
        assert digests(take(config, 3)) == expected
        assert all(np.load(file).dtype == np.uint32 for file in before)

    def test_of_a_file_without_documents_are_none(self, folder: Path, tmp_path: Path) -> None:
        pattern = write_files(tmp_path / "files", "arrayrecord", [[], texts(300), []])
        config = config_of(folder, grain_train_files=pattern, per_device_batch_size=1, data_cache_dir=str(tmp_path))
        assert tokens_of(take(config, batches_per_epoch(config))) == tokens_in(texts(300))
        with pytest.raises(PingLlmError, match="hold no document"):
            take(config.replace(grain_train_files=f"{tmp_path}/files/part-000*"), 1)

    def test_that_do_not_fit_are_an_error_that_names_them(self, folder: Path, tmp_path: Path) -> None:
        config = config_of(folder, data_cache_dir=str(tmp_path))
        take(config, 1)
        for file in self.kept(tmp_path):
            np.save(file, np.load(file) + np.uint32(1))
        with pytest.raises(PingLlmError, match=r"document \d+ of .*arrayrecord is not as long .*: delete .*\.npy"):
            take(config, 1)

    def test_that_cannot_be_kept_say_which_key_to_set(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(PingLlmError, match="set data_cache_dir"):
            take(config_of(folder, data_cache_dir=str(tmp_path / "file")), 1)


def test_every_segment_is_explained(folder: Path) -> None:
    source = BatchSource(text_spec(config_of(folder)))
    written = texts(DOCUMENTS)
    cut = 0
    for sequence in range(8):
        explained = source.explain(40, sequence)
        batch = source[40]["inputs"][sequence]
        ids = [token for segment in explained["segments"] for token in segment["token_ids"]]
        assert ids == batch[: explained["tokens"]].tolist()
        for segment in explained["segments"]:
            number = segment["document"] + 400 * segment["file"].endswith("part-001.arrayrecord")
            document = [256, *written[number].encode(), 257]
            assert segment["token_ids"] == document[segment["begin"] :][: segment["tokens"]]
            cut += segment["begin"] > 0
    assert cut, "a sequence that begins within a document was among them"


class TestResume:
    @pytest.mark.parametrize("steps", [1, 7, 50])
    def test_is_exact(self, folder: Path, steps: int) -> None:
        config = config_of(folder)
        state = state_after(config, steps)
        assert state.next_step == steps
        assert digests(take(config, 5, state)) == digests(take(config, steps + 5)[steps:])

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"data_shuffle_seed": 1}, "seed"),
            ({"enable_data_shuffling": False}, "seed"),
            ({"max_target_length": 256}, "length"),
            ({"per_device_batch_size": 4.0}, "global_batch_size"),
            ({"add_eos": False}, "add_eos"),
        ],
    )
    def test_with_other_settings_is_refused_unless_allowed(
        self, folder: Path, change: dict[str, Any], named: str
    ) -> None:
        state = state_after(config_of(folder), 3)
        with pytest.raises(PingLlmError, match=f"the data is not what this run was trained on: {named}"):
            make_train_loader(config_of(folder, **change), state=state)
        with make_train_loader(config_of(folder, allow_data_change=True, **change), state=state) as loader:
            assert loader.state().next_step == 3

    def test_with_other_files_is_refused(self, folder: Path) -> None:
        state = state_after(config_of(folder), 3)
        with pytest.raises(PingLlmError, match="1 of the 1 sources that this run was trained on are not in the blend"):
            make_train_loader(config_of(folder, grain_train_files=f"{folder}/b/*.arrayrecord"), state=state)

    def test_from_other_kinds_of_data_is_refused_unless_allowed(self, folder: Path) -> None:
        synthetic = Config(dataset_type="synthetic", per_device_batch_size=8, max_target_length=128)
        state = state_after(synthetic, 3)
        with pytest.raises(PingLlmError, match=r"the data is not what this run was trained on: .*dataset_type"):
            make_train_loader(config_of(folder), state=state)
        with make_train_loader(config_of(folder, allow_data_change=True), state=state) as loader:
            assert loader.state().next_step == 3
            next(loader)


class TestBlend:
    def blend(self, folder: Path, **weights: float) -> str:
        return ";".join(f"{folder}/{name}/*.arrayrecord,{weight}" for name, weight in weights.items())

    def mixture(self, folder: Path, path: Path, **weights: float) -> str:
        path.write_text(
            json.dumps({name: {"path": f"{folder}/{name}/*.arrayrecord", "weight": w} for name, w in weights.items()})
        )
        return str(path)

    def test_shares_of_sequences_are_the_weights(self, folder: Path) -> None:
        config = config_of(folder, grain_train_files=self.blend(folder, a=0.25, b=0.75))
        batches = take(config, 128)
        mixture = Mixture.of(text_spec(config).weights)
        sources = [mixture.locate(number)[0] for number in range(1024)]
        assert sources.count(0) == 256
        rows = np.concatenate([batch["inputs"] for batch in batches])
        marks = {0: b"<0:", 1: b"<1:"}
        for source, row in zip(sources, rows, strict=True):
            assert marks[1 - source] not in bytes(row[row < 256].astype(np.uint8))

    def test_a_file_says_the_same_as_the_key(self, folder: Path, tmp_path: Path) -> None:
        file = self.mixture(folder, tmp_path / "mixture.json", a=3, b=7)
        by_file = config_of(folder, grain_train_files="", grain_train_mixture_config_path=file)
        by_key = config_of(folder, grain_train_files=self.blend(folder, a=0.3, b=0.7))
        assert digests(take(by_file, 4)) == digests(take(by_key, 4))

    def test_weights_may_change_on_resume_and_each_source_continues_where_it_was(
        self, folder: Path, tmp_path: Path
    ) -> None:
        file = self.mixture(folder, tmp_path / "mixture.json", a=0.5, b=0.5)
        config = config_of(folder, grain_train_files="", grain_train_mixture_config_path=file)
        before = take(config, 10)
        state = state_after(config, 10)
        self.mixture(folder, Path(file), b=0.9, a=0.1)  # in another order, too
        after = take(config, 10, state)
        seen = Counter(documents_of(before) + documents_of(after))
        assert max(seen.values()) == 1
        assert sum(name.startswith("<1:") for name in documents_of(after)) > 5 * sum(
            name.startswith("<0:") for name in documents_of(after)
        )
        alone = documents_of(take(config_of(folder, grain_train_files=f"{folder}/b/*.arrayrecord"), 14))
        of_b = [name for name in documents_of(before) + documents_of(after) if name.startswith("<1:")]
        assert sorted(of_b) == sorted(alone[: len(of_b)])

    def test_a_source_may_be_added_on_resume_but_none_may_go(self, folder: Path) -> None:
        config = config_of(folder, grain_train_files=self.blend(folder, a=0.5, b=0.5))
        state = state_after(config, 4)
        more = config.replace(grain_train_files=self.blend(folder, c=0.5, b=0.25, a=0.25))
        found = documents_of(take(more, 20, state))
        assert {name[:3] for name in found} == {"<0:", "<1:", "<2:"}
        assert max(Counter(documents_of(take(config, 4)) + found).values()) == 1
        with pytest.raises(PingLlmError, match=r"1 of the 2 sources .* keep them, with weight 0"):
            make_train_loader(config.replace(grain_train_files=self.blend(folder, a=1)), state=state)


class TestEvaluation:
    def test_has_every_document_once_the_same_every_time_and_for_any_hosts(self, folder: Path) -> None:
        config = config_of(folder, grain_eval_files=f"{folder}/b/*.arrayrecord")
        with make_eval_loader(config) as loader:
            whole = list(loader)
        assert tokens_of(whole) == tokens_in(texts(300, seed=1))
        with make_eval_loader(config) as loader:
            assert digests(list(loader)) == digests(whole)
        parts = []
        for host in range(2):
            with make_eval_loader(config, host=host, hosts=2) as loader:
                parts.append(list(loader))
        assert digests(together(parts)) == digests(whole)

    def test_may_have_batches_of_another_size(self, folder: Path) -> None:
        config = config_of(folder, grain_eval_files=f"{folder}/b/*.arrayrecord", eval_per_device_batch_size=3)
        with make_eval_loader(config) as loader:
            batches = list(loader)
        assert {len(batch["inputs"]) for batch in batches} == {3}
        assert tokens_of(batches) == tokens_in(texts(300, seed=1))

    def test_ends_after_eval_steps(self, folder: Path) -> None:
        config = config_of(folder, grain_eval_files=f"{folder}/b/*.arrayrecord", eval_steps=2)
        with make_eval_loader(config) as loader:
            assert len(list(loader)) == 2


def test_a_record_without_the_text_is_named(folder: Path) -> None:
    spec = text_spec(config_of(folder))
    with pytest.raises(PingLlmError, match=r"record 7 of .* it has no feature 'body', only text, url; train_data_col"):
        Documents(cast(TextSpec, spec.sources[0]).files, "body").texts(np.array([7]))
