"""Tokenised documents: any batch by its step, every token of an epoch once, the same however it is delivered."""

import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend_fixtures import digests, example, state_after, take, text_config, texts, together, write_files
from ping_llm.batches.batch import Stages
from ping_llm.batches.documents import (
    DocumentsSpec,
    PackedDocuments,
    TokenDocuments,
    documents_spec,
    write_token_file,
)
from ping_llm.batches.loader import Loader
from ping_llm.batches.source import BatchSource
from ping_llm.batches.spec import Batch, DataState, LoaderSettings
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.data.registry import check_files, make_eval_loader, spec_from_config
from ping_llm.data.tokenize import tokenize
from ping_llm.data.tokenizer import tokenizer_of

VOCABULARY = 70_000
LENGTH = 128


def documents(count: int, first: int, seed: int = 0) -> list[npt.NDArray[np.int64]]:
    """Of very different sizes, some longer than a sequence; each begins with its own number."""
    rng = np.random.default_rng(seed)
    sizes = np.minimum(rng.lognormal(3.5, 1.2, count).astype(int), 1000)
    return [np.append(first + i, rng.integers(60_000, VOCABULARY, n)) for i, n in enumerate(sizes.tolist())]


def write_arrow(path: Path, lists: Sequence[Any]) -> None:
    table = pa.table({"input_ids": pa.array([None if x is None else list(x) for x in lists], pa.list_(pa.int32()))})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, 70)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_token_file(folder / "a-0.bin", documents(700, 0), VOCABULARY)
    write_token_file(folder / "a-1.bin", documents(500, 700, seed=1), VOCABULARY)
    write_token_file(folder / "b.bin", documents(400, 10_000, seed=2), VOCABULARY)
    write_arrow(folder / "c.arrow", documents(300, 20_000, seed=3))
    return folder


def config_of(folder: Path, pattern: str = "a-*.bin", **changes: Any) -> Config:
    keys = {"grain_file_type": "tokens", "grain_train_files": f"{folder}/{pattern}", "vocab_size": VOCABULARY}
    return text_config(folder, **keys | {"tokenizer_path": "", "max_segments_per_seq": -1} | changes)


def tokens_of(batches: Sequence[Batch]) -> Counter[int]:
    return Counter(np.concatenate([b["inputs"][b["inputs_segmentation"] > 0] for b in batches]).tolist())


def sequences_per_epoch(folder: Path, *names: str) -> int:
    spec = documents_spec([DocumentsSpec.of([folder / name for name in names])], length=LENGTH)
    return BatchSource(spec).sequences_per_epoch


class TestFiles:
    def test_any_part_of_any_document_can_be_read(self, folder: Path) -> None:
        found = TokenDocuments([folder / "a-0.bin", folder / "c.arrow"])
        expected = [*documents(700, 0), *documents(300, 20_000, seed=3)]
        assert found.lengths.tolist() == [len(document) for document in expected]
        numbers = np.array([999, 0, 700, 699, 770])
        begins, sizes = found.lengths[numbers] // 3, found.lengths[numbers] // 2
        pieces = [expected[n][b : b + s] for n, b, s in zip(numbers, begins, sizes, strict=True)]
        assert np.array_equal(
            found.read(numbers, begins.astype(np.int64), sizes.astype(np.int64)), np.concatenate(pieces)
        )
        assert found.numbers.locate(770) == (folder / "c.arrow", 70)

    def test_sixteen_bits_are_enough_for_a_small_vocabulary(self, tmp_path: Path) -> None:
        write_token_file(tmp_path / "x.bin", [[1, 65_535], [], [7]], 1 << 16)
        assert (tmp_path / "x.bin").stat().st_size == 6
        found = TokenDocuments([tmp_path / "x.bin"])
        assert found.lengths.tolist() == [2, 0, 1]
        assert found.read(*np.array([[2, 0], [0, 1], [1, 1]])).tolist() == [7, 65_535]

    def test_are_in_the_layout_of_megatron(self, tmp_path: Path) -> None:
        """As `megatron.core.datasets.indexed_dataset` writes it."""
        write_token_file(tmp_path / "x.bin", [[1, 2, 3], [4]], 100)
        index = (tmp_path / "x.idx").read_bytes()
        assert index[:9] == b"MMIDIDX\x00\x00"
        assert np.frombuffer(index, "<u8", 1, 9) == 1
        assert index[17] == 8, "uint16"
        assert np.frombuffer(index, "<u8", 2, 18).tolist() == [2, 3]
        assert np.frombuffer(index, "<i4", 2, 34).tolist() == [3, 1]
        assert np.frombuffer(index, "<i8", 2, 42).tolist() == [0, 6]
        assert np.frombuffer(index, "<i8", 3, 58).tolist() == [0, 1, 2]

    @pytest.mark.parametrize(
        ("damage", "said"),
        [
            (lambda bin, idx: idx.write_bytes(b"nonsense"), "is not the index of a token file"),
            (lambda bin, idx: idx.write_bytes(idx.read_bytes()[:60]), "is cut off"),
            (lambda bin, idx: bin.write_bytes(bin.read_bytes()[:48]), "fewer than its index says"),
            (lambda bin, idx: idx.write_bytes(idx.read_bytes()[:34] + b"\xff" * 40 + idx.read_bytes()[74:]), "fewer"),
            (lambda bin, idx: bin.unlink(), "cannot be read"),
            (lambda bin, idx: idx.unlink(), "cannot be read"),
        ],
    )
    def test_damage_is_one_line_that_names_the_file(self, tmp_path: Path, damage: Any, said: str) -> None:
        file = tmp_path / "x.bin"
        write_token_file(file, documents(30, 0), VOCABULARY)
        damage(file, tmp_path / "x.idx")
        with pytest.raises(PingLlmError, match=rf"x\.(bin|idx).*{said}"):
            PackedDocuments(DocumentsSpec((file,), ""), LENGTH, 0, Stages()).packed(range(5))

    def test_begins_that_lie_outside_are_refused_not_read(self, tmp_path: Path) -> None:
        write_token_file(tmp_path / "x.bin", [[1, 2], [3, 4]], 100)
        index = bytearray((tmp_path / "x.idx").read_bytes())
        index[42:50] = np.array([-4], "<i8").tobytes()
        (tmp_path / "x.idx").write_bytes(index)
        with pytest.raises(PingLlmError, match="is damaged"):
            TokenDocuments([tmp_path / "x.bin"]).read(*np.array([[0], [0], [2]]))

    def test_a_token_beyond_the_vocabulary_is_refused(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(PingLlmError, match="document 1 has a token outside of the 100 there are"):
            write_token_file(tmp_path / "x.bin", [[1], [100]], 100)
        assert not list(tmp_path.glob("x*"))
        with pytest.raises(PingLlmError, match=r"has token 69\d+, but the vocabulary has 65000"):
            take(config_of(folder, vocab_size=65_000), 1)

    def test_a_column_that_holds_no_tokens_is_refused(self, tmp_path: Path) -> None:
        write_arrow(tmp_path / "x.arrow", [[1], None])
        with pytest.raises(PingLlmError, match=r"no column 'text', only input_ids"):
            check_files(config_of(tmp_path, "x.arrow"))
        assert TokenDocuments([tmp_path / "x.arrow"]).lengths.tolist() == [1, 0]


class TestBatches:
    @pytest.mark.parametrize(("hosts", "workers"), [(2, 0), (4, 0), (8, 0), pytest.param(2, 2, marks=pytest.mark.slow)])
    def test_are_the_same_for_any_number_of_hosts_and_workers(self, folder: Path, hosts: int, workers: int) -> None:
        config = config_of(folder)
        split = config.replace(grain_worker_count=workers)
        parts = [take(split, 6, host=host, hosts=hosts) for host in range(hosts)]
        assert digests(together(parts)) == digests(take(config, 6))

    def test_an_epoch_holds_every_token_once(self, folder: Path) -> None:
        sequences = sequences_per_epoch(folder, "a-0.bin", "a-1.bin")
        batches = take(config_of(folder, per_device_batch_size=1, num_epoch=1), sequences + 2)
        expected = np.concatenate([*documents(700, 0), *documents(500, 700, seed=1)])
        assert tokens_of(batches) == Counter(expected.tolist())
        assert not any((batch["inputs_segmentation"] > 0).any() for batch in batches[sequences:])
        assert np.mean([batch["inputs_segmentation"] == 0 for batch in batches[:sequences]]) < 0.01

    def test_without_shuffling_come_in_the_order_of_the_files(self, folder: Path) -> None:
        steps = sequences_per_epoch(folder, "a-0.bin", "a-1.bin")
        batches = take(config_of(folder, per_device_batch_size=1, enable_data_shuffling=False), steps)
        found = np.concatenate([batch["inputs"][batch["inputs_segmentation"] > 0] for batch in batches])
        assert np.array_equal(found, np.concatenate([*documents(700, 0), *documents(500, 700, seed=1)]))
        with pytest.raises(PingLlmError, match="1 of the 1 sources"):
            take(config_of(folder), 1, state_after(config_of(folder, enable_data_shuffling=False), 1))

    def test_segments_are_documents_whose_positions_begin_anew(self, folder: Path) -> None:
        [batch] = take(config_of(folder), 1)
        starts = (batch["inputs_position"] == 0) & (batch["inputs_segmentation"] > 0)
        assert starts.sum() == batch["inputs_segmentation"].max(axis=1).sum()
        assert (batch["inputs"][starts] < 60_000).mean() > 0.8, "most segments begin where a document does"

    def test_evaluation_is_one_epoch_the_same_every_time(self, folder: Path) -> None:
        config = config_of(folder, grain_eval_files=f"{folder}/c.arrow", eval_data_columns="input_ids", eval_interval=5)
        runs = [list(make_eval_loader(config)) for _ in range(2)]
        assert digests(runs[0]) == digests(runs[1])
        assert tokens_of(runs[0]) == Counter(np.concatenate(documents(300, 20_000, seed=3)).tolist())

    def test_every_segment_is_explained(self, folder: Path) -> None:
        spec = spec_from_config(config_of(folder))
        explained = BatchSource(spec).explain(7, 3)
        batch = BatchSource(spec)[7]
        ids = [token for segment in explained["segments"] for token in segment["token_ids"]]
        assert ids == batch["inputs"][3][: explained["tokens"]].tolist()
        written = {"a-0.bin": documents(700, 0), "a-1.bin": documents(500, 700, seed=1)}
        for segment in explained["segments"]:
            document = written[Path(segment["file"]).name][segment["document"]]
            assert segment["token_ids"] == document[segment["begin"] :][: segment["tokens"]].tolist()

    def test_no_batch_has_more_segments_than_said(self, folder: Path) -> None:
        source = BatchSource(documents_spec([DocumentsSpec.of([folder / "b.bin"])], length=LENGTH, global_batch_size=8))
        for step in range(12):
            assert source[step]["inputs_segmentation"].max() == source.max_segments(step)

    def test_a_source_can_be_sent_to_another_process_after_it_was_used(self, folder: Path) -> None:
        source = BatchSource(spec_from_config(config_of(folder)))
        batch = source[3]
        assert digests([pickle.loads(pickle.dumps(source))[3]]) == digests([batch])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 0}, "set vocab_size"),
        ({"max_segments_per_seq": 4}, "packs"),
    ],
)
def test_what_it_cannot_do_is_refused(folder: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PingLlmError, match=f"grain_file_type=tokens.*{said}"):
        take(config_of(folder, **changes), 1)


class TestExcludedDocuments:
    def test_are_padding_and_nothing_else_changes(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "bad.txt").write_text(f"{folder}/a-0.bin 5\na-1.bin 499\nb.bin 1\n")
        plain = config_of(folder, num_epoch=1, per_device_batch_size=1)
        without = plain.replace(skip_documents=str(tmp_path / "bad.txt"))
        steps = sequences_per_epoch(folder, "a-0.bin", "a-1.bin")
        before, after = take(plain, steps), take(without, steps)
        excluded = Counter([*documents(700, 0)[5].tolist(), *documents(500, 700, seed=1)[499].tolist()])
        assert tokens_of(before) - tokens_of(after) == excluded
        for one, other in zip(before, after, strict=True):
            kept = [s for s in _segments(one) if s[0] not in (5, 700 + 499)]
            if len(kept) == len(_segments(other)):
                assert kept == _segments(other)
        assert sum(digests([one]) == digests([other]) for one, other in zip(before, after, strict=True)) > 0.9 * steps

    @pytest.mark.parametrize(
        ("text", "said"),
        [("a-0.bin", "line 1: write FILE NUMBER"), ("a-0.bin 700\n", "no document 700 of a file a-0.bin to leave out")],
    )
    def test_that_are_not_there_are_named(self, folder: Path, tmp_path: Path, text: str, said: str) -> None:
        (tmp_path / "bad.txt").write_text(text)
        with pytest.raises(PingLlmError, match=said):
            take(config_of(folder, "a-0.bin", skip_documents=str(tmp_path / "bad.txt")), 1)


def _segments(batch: Batch) -> list[list[int]]:
    inputs, segment = batch["inputs"][0], batch["inputs_segmentation"][0]
    return [inputs[segment == number].tolist() for number in range(1, int(segment.max()) + 1)]


class TestResume:
    def blend(self, folder: Path, **weights: float) -> str:
        names = {"a": "a-*.bin", "b": "b.bin"}
        return ";".join(f"{folder}/{names[name]},{weight}" for name, weight in weights.items())

    def test_is_exact_with_other_hosts_workers_weights_and_sources(self, folder: Path) -> None:
        config = config_of(folder, grain_train_files=self.blend(folder, a=1))
        state = state_after(config, 5)
        assert digests(take(config, 5, state)) == digests(take(config, 10)[5:])
        blended = config.replace(grain_train_files=self.blend(folder, b=0.5, a=0.5))
        continued = take(blended, 20, state)
        parts = [take(blended, 20, state, host=host, hosts=2) for host in range(2)]
        assert digests(together(parts)) == digests(continued)
        alone = {row.tobytes() for batch in take(config, 15)[5:] for row in batch["inputs"]}
        from_a = [row.tobytes() in alone for batch in continued for row in batch["inputs"]]
        assert sum(from_a) == len(alone) == 80, "half of 20 batches: what source a would have given next, once"

    def test_changed_files_are_refused(self, folder: Path, tmp_path: Path) -> None:
        state = state_after(config_of(folder), 1)
        write_token_file(tmp_path / "a-0.bin", documents(10, 0), VOCABULARY)
        with pytest.raises(PingLlmError, match="1 of the 1 sources that this run was trained on are not in the blend"):
            take(config_of(tmp_path), 1, state)


class TestTokenize:
    def test_text_becomes_the_tokens_that_training_would_make(self, tmp_path: Path) -> None:
        files = [texts(40), texts(30, seed=1)]
        config = text_config(tmp_path, grain_train_files=write_files(tmp_path / "text", "arrayrecord", files))
        made = tokenize(config, tmp_path / "tokens", workers=1)
        found = TokenDocuments(sorted((tmp_path / "tokens").glob("*.bin")))
        tokens, sizes = tokenizer_of(config).encode([text for file in files for text in file])
        assert found.lengths.tolist() == sizes.tolist()
        everything = found.read(np.arange(70), np.zeros(70, dtype=np.int64), sizes)
        assert np.array_equal(everything, tokens)
        assert (made["documents"], made["tokens"], made["files"]) == (70, len(tokens), 2)

    def test_continues_where_it_was_and_refuses_other_settings(self, tmp_path: Path) -> None:
        config = text_config(tmp_path, grain_train_files=write_files(tmp_path / "text", "arrayrecord", [texts(9)] * 2))
        first = tokenize(config, tmp_path / "tokens", workers=1)
        kept, lost = sorted((tmp_path / "tokens").glob("*.idx"))
        before = kept.stat().st_mtime_ns
        lost.unlink()
        assert tokenize(config, tmp_path / "tokens", workers=2) == first
        assert kept.stat().st_mtime_ns == before
        with pytest.raises(PingLlmError, match="tokenized otherwise"):
            tokenize(config.replace(add_eos=False), tmp_path / "tokens")

    @pytest.mark.parametrize("kind", ["parquet", "tfrecord"])
    def test_tokens_that_are_there_already_are_copied(self, tmp_path: Path, kind: str) -> None:
        lists = [document.tolist() for document in documents(20, 0)]
        file = tmp_path / f"x.{kind}"
        if kind == "parquet":
            pq.write_table(pa.table({"ids": lists}), file)
        else:
            file.write_bytes(b"".join(_record(example(ids=tokens)) for tokens in lists))
        config = text_config(
            tmp_path,
            grain_file_type=kind,
            grain_train_files=str(file),
            train_data_columns="ids",
            vocab_size=VOCABULARY,
        )
        tokenize(config, tmp_path / "tokens", copies=True)
        found = TokenDocuments([tmp_path / "tokens" / f"{file.name}.bin"])
        assert found.lengths.tolist() == [len(tokens) for tokens in lists]
        assert found.read(*np.array([[7], [0], [len(lists[7])]])).tolist() == lists[7]


def _record(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + b"sum1" + data + b"sum2"


def test_the_library_of_batches_needs_neither_jax_nor_anything_of_networks() -> None:
    modules = "ping_llm.batches.documents, ping_llm.batches.loader, ping_llm.batches.source"
    unwanted = "{'jax', 'duckdb', 'ping_llm.rows', 'ping_llm.tokens', 'ping_llm.sources', 'ping_llm.config'}"
    script = f"import sys, {modules}; sys.exit(str({unwanted} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert done.stderr.strip() == ""


def test_a_loader_continues_from_a_stored_state(folder: Path) -> None:
    spec = documents_spec([DocumentsSpec.of([folder / "b.bin"])], length=LENGTH, global_batch_size=4)
    with Loader(spec, LoaderSettings(worker_count=0)) as loader:
        seen = [next(loader) for _ in range(3)]
        stored = loader.state().to_json()
    with Loader(spec, LoaderSettings(worker_count=0)) as loader:
        loader.restore(DataState.from_json(stored))
        seen += [next(loader) for _ in range(3)]
    assert digests(seen) == digests([BatchSource(spec)[step] for step in range(6)])
