"""Text that is read in order: Parquet, TFRecord and Hugging Face. Every document once, exact resume, and an end."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from backend_fixtures import (
    digests,
    reading,
    state_after,
    take,
    text_config,
    text_of,
    texts,
    texts_in,
    together,
    write,
    write_files,
)
from ping_llm.batches.spec import Batch
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.data.documents import EpochStream, file_stream, interleaved, reader_of, share
from ping_llm.data.registry import Part, check_files, make_eval_loader, make_train_loader

pytest.importorskip("tiktoken", reason="the package tiktoken is not installed")

SUFFIX = {"parquet": "parquet", "tfrecord": "tfrecord", "hf": "json"}


@pytest.fixture(params=list(SUFFIX))
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "hf":
        pytest.importorskip("datasets", reason="the package datasets is not installed")
    return str(request.param)


def config_of(folder: Path, kind: str, files: Sequence[Sequence[str]], **changes: Any) -> Config:
    pattern = write_files(folder / "files", SUFFIX[kind], files)
    return text_config(folder, **reading(kind, pattern) | changes)


def cut(documents: Sequence[str], files: int) -> list[Sequence[str]]:
    return [documents[number::files] for number in range(files)]


def batches_until_padding(config: Config) -> list[Any]:
    with make_train_loader(config) as loader:
        found = []
        while (batch := next(loader))["inputs_segmentation"].any():
            found.append(batch)
        return found


def test_without_shuffling_documents_come_in_the_order_of_their_files(tmp_path: Path, kind: str) -> None:
    config = config_of(tmp_path, kind, [texts(120)], enable_data_shuffling=False, num_epoch=2)
    assert texts_in(batches_until_padding(config)) == 2 * texts(120)
    assert digests(take(config, 3, state_after(config, 2))) == digests(take(config, 5)[2:])


def write_for_hugging_face(path: Path, form: str, documents: Sequence[str]) -> None:
    table = pa.table({"text": pa.array(list(documents), pa.string())})
    if form == "parquet":
        pq.write_table(table, path)
    elif form == "csv":
        csv.write_csv(table, path)
    elif form == "text":
        path.write_text("\n".join(documents))
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("form", ["parquet", "csv", "text", "arrow"])
def test_hugging_face_reads_files_of_every_form(tmp_path: Path, form: str) -> None:
    pytest.importorskip("datasets", reason="the package datasets is not installed")
    documents = texts(40)
    for number, part in enumerate(cut(documents, 2)):
        write_for_hugging_face(tmp_path / f"part-{number}.{form}", form, part)
    keys = {"dataset_type": "hf", "hf_path": form, "hf_train_files": str(tmp_path / f"*.{form}"), "num_epoch": 1}
    assert sorted(texts_in(batches_until_padding(text_config(tmp_path, **keys)))) == sorted(documents)


def test_hugging_face_is_given_urls_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the package datasets is not installed")
    memory, documents = fsspec.filesystem("memory"), texts(40)
    for number, part in enumerate(cut(documents, 2)):
        write(tmp_path / "part.json", part)
        memory.pipe(f"/of-this-test/part-{number}.json", (tmp_path / "part.json").read_bytes())
    keys = {"dataset_type": "hf", "hf_path": "json", "hf_train_files": "memory://of-this-test/*.json", "num_epoch": 1}
    config = text_config(tmp_path, **keys, hf_eval_files="memory://of-this-test/part-1.json", eval_interval=5)
    check_files(config)
    assert sorted(texts_in(batches_until_padding(config))) == sorted(documents)
    with make_eval_loader(config) as loader:
        assert texts_in(list(loader)) == list(cut(documents, 2)[1])
    state = state_after(config, 1)
    assert digests(take(config, 3, state)) == digests(take(config, 4)[1:])
    with pytest.raises(
        PingLlmError, match=r"urls: 'memory://of-this-test/\*.json' then, 'memory://of-this-test/part-0"
    ):
        make_train_loader(config.replace(hf_train_files="memory://of-this-test/part-0.json"), state=state)


class TestOneHost:
    def test_two_epochs_have_all_of_the_text_twice_in_other_orders(self, tmp_path: Path, kind: str) -> None:
        documents = texts(150)
        config = config_of(tmp_path, kind, cut(documents, 5), num_epoch=2)
        parts = texts_in(batches_until_padding(config))
        assert sorted(parts) == sorted(documents * 2)
        assert len(set(parts[: 150 - config.shuffle_window])) == 150 - config.shuffle_window  # windows span epochs
        assert parts[:150] != parts[150:]
        assert parts[:150] != documents

    @pytest.mark.parametrize("steps", [1, 4, 9, 20])
    def test_resume_is_exact_at_any_batch(self, tmp_path: Path, kind: str, steps: int) -> None:
        config = config_of(tmp_path, kind, cut(texts(100), 3))
        state = state_after(config, steps)
        assert digests(take(config, 8, state)) == digests(take(config, steps + 8)[steps:])

    def test_a_run_that_had_ended_is_still_at_its_end(self, tmp_path: Path, kind: str) -> None:
        config = config_of(tmp_path, kind, cut(texts(40), 2), num_epoch=1)
        end = len(batches_until_padding(config))
        [batch] = take(config, 1, state_after(config, end + 1))
        assert not batch["inputs_segmentation"].any()

    def test_other_settings_are_refused(self, tmp_path: Path, kind: str) -> None:
        config = config_of(tmp_path, kind, cut(texts(40), 2))
        state = state_after(config, 2)
        with pytest.raises(PingLlmError, match="the data is not what this run was trained on: shuffle_window"):
            make_train_loader(config.replace(shuffle_window=9), state=state)
        write(tmp_path / "files" / f"part-000.{SUFFIX[kind]}", texts(20, seed=9))
        with pytest.raises(PingLlmError, match="the data is not what this run was trained on: files"):
            make_train_loader(config, state=state)

    def test_another_number_of_hosts_is_said_to_be_inexact(
        self, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = config_of(tmp_path, kind, cut(texts(40), 2))
        state = state_after(config, 2)
        with caplog.at_level(logging.WARNING), make_train_loader(config, host=0, hosts=2, state=state) as loader:
            assert loader.state().next_step == 2
            next(loader)
        assert (
            "the data was read by 1 host(s) before and is now by 2: this backend cannot resume exactly" in caplog.text
        )

    def test_the_end_of_the_data_is_said_and_padding_follows(
        self, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = config_of(tmp_path, kind, cut(texts(20), 2), num_epoch=1)
        with caplog.at_level(logging.WARNING), make_train_loader(config) as loader:
            for _ in range(30):
                batch = next(loader)
            assert loader.report.to_json()["padding_fraction"] > 0.5  # type: ignore[attr-defined]
        assert not batch["inputs_segmentation"].any()
        assert caplog.text.count("host 0 has no more training data after step") == 1

    def test_debug_mode_and_the_graph_show_where_the_time_goes(
        self, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        graph = tmp_path / "graph"
        config = config_of(tmp_path, kind, cut(texts(40), 2), grain_debug_mode=True, grain_visualization_dir=str(graph))
        with caplog.at_level(logging.INFO):
            take(config, 5)
        [table] = [record.getMessage() for record in caplog.records if "bottleneck" in record.getMessage()]
        for expected in ("pipeline: 5 batches", " count ", " min ms ", " mean ms ", " max ms ", "lay out", "waiting"):
            assert expected in table
        numbers = json.loads((graph / "pipeline.json").read_text())
        assert numbers["waiting"]["count"] == numbers["stages"]["lay out"]["count"] == 4  # the first is counted apart
        for times in (numbers["waiting"], *numbers["stages"].values()):
            assert 0 < times["min_ms"] <= times["mean_ms"] <= times["max_ms"] or times["count"] == 0
        picture = (graph / "pipeline_graph.svg").read_text()
        for expected in (*numbers["stages"], "uint32 tokens", "6 × int32 [8, 128]", "training process"):
            assert expected in picture

    def test_empty_files_do_not_hang(self, tmp_path: Path, kind: str) -> None:
        if kind == "hf":
            pytest.skip("datasets refuses files without any document itself")
        [batch] = take(config_of(tmp_path, kind, [[], []]), 1)
        assert not batch["inputs_segmentation"].any()

    def test_evaluation_is_all_of_the_text_for_any_number_of_hosts(self, tmp_path: Path, kind: str) -> None:
        documents = texts(60)
        config = config_of(tmp_path, kind, cut(documents, 3))
        if kind == "hf":
            config = config.replace(hf_eval_files=config.hf_train_files)
        else:
            config = config.replace(grain_eval_files=config.grain_train_files)
        found = []
        for host, hosts in ((0, 1), (0, 2), (1, 2), (0, 1)):
            with make_eval_loader(config, host=host, hosts=hosts) as loader:
                found.append(list(loader))
        assert digests(found[0]) == digests(found[3]) == digests(together(found[1:3]))
        assert Counter(text_of(found[0])) == Counter("".join(documents))


class TestTwoHosts:
    def two_hosts(self, config: Config, steps: int) -> list[list[Batch]]:
        return [take(config, steps, host=host, hosts=2) for host in range(2)]

    def test_with_more_files_than_hosts_each_reads_its_own(self, tmp_path: Path, kind: str) -> None:
        files = cut(texts(90), 3)
        first, second = self.two_hosts(config_of(tmp_path, kind, files, num_epoch=1), 40)
        assert sorted(texts_in(first)) == sorted([*files[0], *files[2]])
        assert sorted(texts_in(second)) == sorted(files[1])

    def test_with_fewer_files_than_hosts_they_share_the_documents(self, tmp_path: Path, kind: str) -> None:
        documents = texts(80)
        first, second = map(texts_in, self.two_hosts(config_of(tmp_path, kind, [documents], num_epoch=1), 40))
        assert len(first) == len(second) == 40
        assert sorted(first + second) == sorted(documents)

    def test_a_host_that_runs_out_gives_padding_while_the_other_continues(self, tmp_path: Path, kind: str) -> None:
        config = config_of(tmp_path, kind, [texts(90), texts(10, seed=1)], num_epoch=1)
        has_text = [[bool(batch["inputs_segmentation"].any()) for batch in part] for part in self.two_hosts(config, 60)]
        long, short = (steps.index(False) for steps in has_text)
        assert short < long
        assert not any(has_text[1][short:])


class TestFiles:
    @pytest.mark.parametrize(("files", "hosts"), [(1, 1), (7, 2), (8, 3), (2, 2), (5, 5)])
    def test_whole_files_are_shared_as_evenly_as_possible(self, files: int, hosts: int) -> None:
        shares = [share(range(files), Part(host=host, hosts=hosts))[0] for host in range(hosts)]
        assert sorted(file for mine in shares for file in mine) == list(range(files))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1

    @pytest.mark.parametrize("suffix", ["parquet", "tfrecord"])
    @pytest.mark.parametrize("hosts", [1, 2, 5])
    def test_skipping_documents_leads_to_where_reading_them_does(self, tmp_path: Path, suffix: str, hosts: int) -> None:
        write_files(tmp_path, suffix, cut(texts(50), 4))
        files = sorted(tmp_path.glob("*"))

        def stream() -> EpochStream:
            part = Part(host=hosts - 1, hosts=hosts)
            return file_stream(files, reader_of(suffix, "text"), part, seed=3, epochs=-1)

        reading = stream()
        for _ in range(120 // hosts):
            position = json.loads(json.dumps(reading.position()))
            resumed = stream()
            resumed.seek(position)
            assert resumed.read() == reading.read()

    def test_interleaving_takes_a_document_of_each_open_file_in_turn(self) -> None:
        assert list(interleaved(iter([iter("aaa"), iter("b"), iter(""), iter("cc")]))) == list("abcaca")
        many = [iter([number] * (number % 3)) for number in range(40)]
        assert sorted(interleaved(iter(many))) == sorted(number for number in range(40) for _ in range(number % 3))

    def test_a_column_that_is_not_there_or_holds_no_text_is_named(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"text": ["x"], "size": [1]}), tmp_path / "a.parquet")
        with pytest.raises(PingLlmError, match=r"a\.parquet has no column 'body', only text, size"):
            next(reader_of("parquet", "body")(tmp_path / "a.parquet"))
        with pytest.raises(PingLlmError, match=r"column 'size' of .*a\.parquet holds no text, but int64"):
            next(reader_of("parquet", "size")(tmp_path / "a.parquet"))

    def test_a_file_that_is_cut_off_is_named(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, "tfrecord", [texts(5)])
        file = tmp_path / "files" / "part-000.tfrecord"
        file.write_bytes(file.read_bytes()[:-3])
        with pytest.raises(PingLlmError, match=r"part-000\.tfrecord is cut off in the middle of a record"):
            take(config, 1)
