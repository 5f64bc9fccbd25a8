"""What is wrong with the text that a run is to be trained on is said at once, in one line, and leaves no trace."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backend_fixtures import reading, take, text_config, texts, write_files
from config_fixtures import refusal
from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError
from ping_llm.data.registry import check_files
from ping_llm.training import train

pytest.importorskip("tiktoken", reason="the package tiktoken is not installed")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return {kind: write_files(tmp_path / kind, kind, [texts(5)]) for kind in ("arrayrecord", "parquet", "tfrecord")}


def said(config: Config) -> str:
    with pytest.raises(PingLlmError) as caught:
        check_files(config)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize("expected", ["arrayrecord", "parquet", "tfrecord"])
@pytest.mark.parametrize("given", ["arrayrecord", "parquet", "tfrecord"])
def test_files_of_another_type_are_refused_with_the_key_to_change(
    tmp_path: Path, files: dict[str, str], expected: str, given: str
) -> None:
    config = text_config(tmp_path, grain_file_type=expected, grain_train_files=files[given])
    if expected == given:
        check_files(config)
    else:
        article = "an" if given == "arrayrecord" else "a"
        assert f" is {article} {given} file; set grain_file_type={given}" in said(config).lower()


def test_files_of_no_known_type_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("just text, nothing else")
    for kind in ("arrayrecord", "parquet", "tfrecord"):
        config = text_config(tmp_path, grain_file_type=kind, grain_train_files=f"{tmp_path}/a.txt")
        assert "files are expected, but" in said(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "grain_train_files is not set: give a pattern of the training files"),
        ({"grain_train_files": "{0}/none*"}, "grain_train_files: no file matches {0}/none*"),
        (
            {"grain_train_files": "{arrayrecord}", "eval_interval": 5},
            "grain_eval_files is not set: name the evaluation files, or set eval_interval to -1",
        ),
        (
            {"grain_train_files": "{arrayrecord}", "grain_train_mixture_config_path": "x"},
            "set grain_train_files or grain_train_mixture_config_path, not both",
        ),
        (
            {"grain_file_type": "parquet", "grain_train_files": "{parquet},1;{parquet}x,2"},
            "grain_file_type=parquet cannot blend: only arrayrecord and tokens can",
        ),
    ],
)
def test_grain_says_what_is_missing(
    tmp_path: Path, files: dict[str, str], changes: dict[str, Any], message: str
) -> None:
    filled = {k: v.format(tmp_path, **files) if isinstance(v, str) else v for k, v in changes.items()}
    assert said(text_config(tmp_path, **filled)) == message.format(tmp_path)


@pytest.mark.parametrize("weights", ["a,x", "a,0.5;b", "a,-1", "a,0;b,0", "a,1;;b,2"])
def test_weights_that_do_not_parse_are_refused(weights: str) -> None:
    assert "grain_train_files" in refusal(None, f"grain_train_files={weights}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory"),
        ("{", "Invalid JSON: EOF while parsing"),
        ("[]", 'Input should be an object; write {"name": {"path": pattern, "weight": number}, …}'),
        ("{}", "no files are given"),
        ('{"a": {"path": "x"}}', "'a' 'weight' Field required"),
        ('{"a": {"path": "x", "weight": "0.5"}}', "'a' 'weight' Input should be a valid number"),
        ('{"a": {"path": "x", "weight": NaN}}', "'a' 'weight' Input should be less than"),
        ('{"a": {"path": "x", "weight": -1}}', "'a' 'weight' Input should be greater than or equal to 0"),
        ('{"a": {"path": "x", "weight": 0}}', "are all 0; at least one must be positive"),
        (json.dumps({n: {"path": "x", "weight": 1} for n in "ab"}), "'x' is in the blend twice"),
    ],
)
def test_a_mixture_that_cannot_be_used_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "mixture.json"
    if content is not None:
        file.write_text(content)
    config = text_config(tmp_path, grain_train_mixture_config_path=str(file))
    assert said(config).startswith(f"grain_train_mixture_config_path={file}")
    assert message in said(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "hf_path is not set: parquet, json, arrow, csv or text for files, or a name on the Hub"),
        ({"hf_path": "parquet"}, "hf_train_files is not set: name the parquet files"),
        ({"hf_path": "json", "hf_train_files": "none*"}, "hf_train_files: no file matches none*"),
        ({"hf_path": "a/b", "eval_interval": 5}, "hf_eval_split is not set: name a split of a/b"),
    ],
)
def test_hf_says_what_is_missing(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    pytest.importorskip("datasets", reason="the package datasets is not installed")
    assert said(text_config(tmp_path, dataset_type="hf", **changes)) == message


@pytest.mark.parametrize(
    ("dataset_type", "package", "extra"),
    [("hf", "datasets", "hf"), ("tfds", "tensorflow", "tfds"), ("c4_mlperf", "tensorflow", "tfds")],
)
def test_a_missing_package_is_answered_with_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset_type: str, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    config = text_config(tmp_path, dataset_type=dataset_type, dataset_path=str(tmp_path))
    assert f'needs the package {package}: pip install "ping-llm[{extra}]"' in said(config)


@pytest.mark.parametrize("kind", ["arrayrecord", "parquet", "tfrecord", "hf"])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_column_that_is_not_there_is_said_before_the_start(tmp_path: Path, kind: str, split: str) -> None:
    if kind == "hf":
        pytest.importorskip("datasets", reason="the package datasets is not installed")
    pattern = write_files(tmp_path / "files", "json" if kind == "hf" else kind, [texts(5), texts(5, seed=1)])
    keys = reading(kind, pattern)
    keys |= {name.replace("train", "eval"): value for name, value in keys.items() if name.endswith("files")}
    config = text_config(tmp_path, **keys, eval_interval=5)
    check_files(config)
    assert "'body'" in said(config.replace(**{f"{split}_data_columns": "body"}))


def test_the_file_without_the_column_is_named(tmp_path: Path) -> None:
    pattern = write_files(tmp_path, "parquet", [texts(5)])
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "part-001.parquet")
    message = said(text_config(tmp_path, grain_file_type="parquet", grain_train_files=pattern))
    assert message == f"{tmp_path}/part-001.parquet has no column 'text', only body"


@pytest.mark.parametrize("damage", ["cut off", "overwritten"])
@pytest.mark.parametrize("kind", ["arrayrecord", "parquet", "hf"])
def test_a_damaged_file_is_named(tmp_path: Path, kind: str, damage: str) -> None:
    if kind == "hf":
        pytest.importorskip("datasets", reason="the package datasets is not installed")
    suffix = "json" if kind == "hf" else kind
    config = text_config(
        tmp_path, **reading(kind, write_files(tmp_path, suffix, [texts(500), texts(500)])), num_epoch=1
    )
    file = tmp_path / f"part-001.{suffix}"
    content = bytearray(file.read_bytes())
    if damage == "cut off":
        del content[-9:]
    else:
        content[2000:3000] = bytes(1000)
    file.write_bytes(content)
    with pytest.raises(PingLlmError) as caught:
        take(config, 60)
    assert f"part-001.{suffix}" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_training_ends_in_that_line_and_leaves_nothing_behind(tmp_path: Path, files: dict[str, str]) -> None:
    runs = tmp_path / "runs"
    config = text_config(tmp_path, grain_train_files=files["parquet"], base_output_directory=str(runs), run_name="x")
    with pytest.raises(PingLlmError, match=r"^grain_train_files: ArrayRecord files are expected, but"):
        train(config)
    assert not runs.exists()
