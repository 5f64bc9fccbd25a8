"""The backends that need TensorFlow: tensorflow-datasets, and C4 as MLPerf lays it out."""

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backend_fixtures import BOS, EOS, digests, example, state_after, take, text_config, texts, texts_in, write_tfrecord
from ping_llm.batches.spec import Batch
from ping_llm.config import Config, load_config
from ping_llm.core.errors import PingLlmError
from ping_llm.data.registry import check_files, make_eval_loader, make_train_loader
from ping_llm.training import train

pytest.importorskip("tensorflow_datasets", reason="TensorFlow is not here; `make test-tensorflow` makes a place for it")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def shared_data() -> Path:
    folder = Path(os.environ.get("PING_LLM_SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("the real data is not here; set PING_LLM_SHARED_DATA to its folder")
    return folder


def dataset(folder: Path, files: list[list[str]]) -> None:
    """A prepared dataset `words/en:1.0.0` with one split, as tensorflow-datasets lays it out."""
    place = folder / "words" / "en" / "1.0.0"
    place.mkdir(parents=True)
    for number, documents in enumerate(files):
        name = f"words-train.tfrecord-{number:05d}-of-{len(files):05d}"
        write_tfrecord_with_checksums(place / name, [example(text=text.encode()) for text in documents])
    feature = {"pythonClassName": "tensorflow_datasets.core.features.text_feature.Text", "text": {}}
    features = {
        "pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
        "featuresDict": {"features": {"text": feature}},
    }
    split = {
        "name": "train",
        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
        "shardLengths": [str(len(documents)) for documents in files],
    }
    info = {"name": "words", "configName": "en", "version": "1.0.0", "fileFormat": "tfrecord", "splits": [split]}
    (place / "features.json").write_text(json.dumps(features))
    (place / "dataset_info.json").write_text(json.dumps(info))


def write_tfrecord_with_checksums(path: Path, records: list[bytes]) -> None:
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)


def config_of(folder: Path, files: list[list[str]], **changes: Any) -> Config:
    dataset(folder, files)
    values = {"dataset_type": "tfds", "dataset_path": str(folder), "dataset_name": "words/en:1.0.0"}
    return text_config(folder, **values | changes)


def test_an_epoch_has_all_of_the_text_once(tmp_path: Path) -> None:
    all_of_them = texts(90)
    config = config_of(tmp_path, [all_of_them[:40], all_of_them[40:]], num_epoch=1)
    found = texts_in(take(config, 30))
    assert sorted(found) == sorted(all_of_them)
    assert found != all_of_them


@pytest.mark.parametrize("steps", [1, 6, 15])
def test_resume_is_exact(tmp_path: Path, steps: int) -> None:
    config = config_of(tmp_path, [texts(50), texts(50, seed=1)])
    state = state_after(config, steps)
    assert digests(take(config, 5, state)) == digests(take(config, steps + 5)[steps:])


def two_hosts(config: Config) -> list[list[Batch]]:
    return [take(config, 40, host=host, hosts=2) for host in range(2)]


class TestTwoHosts:
    def test_each_has_as_many_whole_files_and_what_is_left_over_is_skipped(self, tmp_path: Path) -> None:
        files = [texts(20, seed=number) for number in range(3)]
        first, second = map(texts_in, two_hosts(config_of(tmp_path, files, num_epoch=1)))
        seen = Counter(first + second)
        assert max(seen.values()) == 1
        assert sorted(seen) == sorted(files[0] + files[1])

    def test_with_fewer_files_than_hosts_they_share_the_documents(self, tmp_path: Path) -> None:
        all_of_them = texts(60)
        first, second = map(texts_in, two_hosts(config_of(tmp_path, [all_of_them], num_epoch=1)))
        assert len(first) == len(second) == 30
        assert sorted(first + second) == sorted(all_of_them)

    def test_a_host_that_runs_out_gives_padding_while_the_other_continues(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, [texts(90), texts(10, seed=1)], num_epoch=1)
        ends = [sum(batch["inputs_segmentation"].any() for batch in batches) for batches in two_hosts(config)]
        assert 0 < min(ends) < max(ends) < 40


def test_tensorflow_sees_no_accelerator(tmp_path: Path) -> None:
    import tensorflow as tf

    make_train_loader(config_of(tmp_path, [texts(5)])).close()
    assert tf.config.get_visible_devices("GPU") == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_path": ""}, "dataset_path is not set"),
        ({"dataset_name": "words/en:2.0.0"}, "there is no prepared dataset words/en:2.0.0"),
        ({"train_split": "test"}, "train_split=test: words/en/1.0.0 has only train"),
        ({"train_data_columns": "body"}, "words/en/1.0.0 has no feature 'body', only text"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    config = config_of(tmp_path, [texts(5)], **changes)
    with pytest.raises(PingLlmError) as caught:
        check_files(config)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


class TestMlperf:
    """Against MaxText's own functions."""

    def theirs(self, config: Config, documents: list[list[int]], *, is_tokenised: bool = False) -> list[Batch]:
        import tensorflow as tf

        module = pytest.importorskip("maxtext.input_pipeline.tfds_data_processing_c4_mlperf")
        found = tf.data.Dataset.from_generator(lambda: ({"targets": d} for d in documents), {"targets": tf.int32})
        found = found.map(lambda x: {"targets": tf.ensure_shape(x["targets"], [None])})
        tokenizer = SimpleNamespace(pad_id=0, eos_id=EOS)
        shape = {"max_target_length": config.max_target_length, "is_tokenized_dataset": True}
        batches = module.preprocess_train_dataset(
            found, tokenizer, 1, shuffle_buffer_size=1, data_shuffle_seed=0, use_stream_chunking=is_tokenised, **shape
        )
        return list(batches.as_numpy_iterator())

    def of_the_same_arrays(self, ours: list[Batch], theirs: list[Batch]) -> None:
        rows = [{name: array[i] for name, array in batch.items()} for batch in ours for i in range(8)]
        rows = [row for row in rows if row["inputs"].any()]
        assert len(rows) == len(theirs) > 3
        for row, expected in zip(rows, theirs, strict=True):
            for name, array in row.items():
                np.testing.assert_array_equal(array, expected[name][0], err_msg=name)

    def test_training_and_evaluation_on_text_have_the_batches_of_maxtext(self, tmp_path: Path) -> None:
        # byte 0 is left out, byte 1 ends a document: MaxText says so, whatever the tokenizer
        documents = [f"{text[:40]}\0{text[40:]}\1" for text in texts(60)]
        config = config_of(tmp_path, [documents], dataset_type="c4_mlperf", enable_data_shuffling=False, num_epoch=1)
        tokens = [[BOS, *text.encode(), EOS] for text in documents]
        theirs = self.theirs(config, tokens)
        self.of_the_same_arrays(take(config, 12), theirs)
        config = config.replace(eval_dataset_name="words/en:1.0.0", eval_split="train")
        with make_eval_loader(config) as loader:
            assert loader.max_segments(0) == 1
            self.of_the_same_arrays(list(loader), theirs)

    def test_a_run_of_an_earlier_version_is_not_resumed_with_other_batches(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, [texts(50)], dataset_type="c4_mlperf")
        state = state_after(config, 2)
        assert digests(take(config, 3, state)) == digests(take(config, 5)[2:])
        before = {name: value for name, value in state.identity.items() if name != "mlperf_version"}
        with pytest.raises(PingLlmError, match="mlperf_version: None then, 2 now"):
            make_train_loader(config, state=replace(state, identity=before))

    def test_the_tokenised_validation_set_has_the_batches_of_maxtext(self, tmp_path: Path) -> None:
        config = config_of(tmp_path, [texts(5)], dataset_type="c4_mlperf", eval_dataset_name="words/en:2.0.0")
        place = tmp_path / "words" / "en" / "2.0.0"
        place.mkdir()
        sequences = [list(range(begin, begin + 60)) for begin in range(0, 180, 20)]
        records = [example(ids=sequence) for sequence in sequences]
        write_tfrecord(place / "words-validation_tokenized_3seqs.tfrecord-00000-of-00001", records)
        config = config.replace(eval_split="validation_tokenized_3seqs", max_target_length=64)
        with make_eval_loader(config) as loader:
            self.of_the_same_arrays(list(loader), self.theirs(config, sequences, is_tokenised=True))
        write_tfrecord(place / "words-validation_tokenized_3seqs.tfrecord-00000-of-00001", [example(ids=[1, 600])])
        with pytest.raises(PingLlmError, match="has token 600, but the vocabulary has 512"):
            list(make_eval_loader(config))


@pytest.mark.parametrize("name", ["text_tfds", "text_c4_mlperf"])
def test_the_configurations_train_on_the_sample_of_c4(
    tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = load_config(ROOT / "configs" / f"{name}.yml", ["steps=4", "eval_interval=4", "eval_steps=2"])
    (tmp_path / "here").mkdir()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "data").symlink_to(shared_data)
    monkeypatch.chdir(tmp_path / "here")  # the configurations say ../shared/data
    summary = train(config.replace(run_name=name, base_output_directory=str(tmp_path / "runs"), max_target_length=64))
    assert summary["complete"]
    assert np.isfinite(summary["eval_loss"])
