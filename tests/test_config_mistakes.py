"""Mistakes in a configuration: each is answered with one line that says where and what."""

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from config_fixtures import IN_TMP_PATH, WriteYaml, refusal
from ping_llm.config import KEYS, Config, load_config
from ping_llm.config.maxtext import MAXTEXT_KEYS
from ping_llm.core.errors import PingLlmError


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("max_target_lenght", "max_target_length"),
        ("grain_worker_cout", "grain_worker_count"),
        ("eval-interval", "eval_interval"),
        ("--run_name", "run_name"),
        ("Steps", "steps"),
        ("network_training_files", "network_train_files"),
        ("batch_size", "per_device_batch_size"),
        ("batch-size", "per_device_batch_size"),
    ],
)
def test_a_misspelt_key_is_answered_with_the_nearest_one(write_yaml: WriteYaml, wrong: str, right: str) -> None:
    answer = re.compile(rf"unknown key '{wrong}': did you mean (\w+ or )*{right}( or \w+)*\?")
    message = refusal(None, f"{wrong}=1")
    assert message.startswith(f"override '{wrong}=1': ")
    assert answer.search(message)
    path = write_yaml(f"# a comment\n\nsteps: 5\n{wrong}: 1\n")
    message = refusal(path)
    assert message.startswith(f"{path} line 4: ")
    assert answer.search(message)


def test_a_key_that_resembles_none_is_answered_with_where_to_look() -> None:
    message = refusal(None, "zzz=1")
    assert "unknown key 'zzz'" in message
    assert "python -m ping_llm.config" in message


def test_a_wrong_type_names_line_key_value_and_type(write_yaml: WriteYaml) -> None:
    path = write_yaml("run_name: x\nsteps: many\n")
    assert refusal(path) == f"{path} line 2: steps must be an integer, not 'many'"


@pytest.mark.parametrize(
    ("setting", "must"),
    [
        ("steps=0", "at least 1"),
        ("per_device_batch_size=0", "above 0"),
        ("per_device_batch_size=-1", "above 0"),
        ("max_target_length=63", "at least 64"),
        ("network_context_measurements=0", "at least 1"),
        ("network_max_contexts=0", "at least 1"),
        ("data_shuffle_seed=-1", "from 0 to 4294967295"),
        ("data_shuffle_seed=4294967296", "from 0 to 4294967295"),
        ("grain_worker_count=-2", "at least -1"),
        ("grain_per_worker_buffer_size=0", "at least 1, or -1"),
        ("grain_ram_budget_mb=0", "at least 1"),
        ("eval_interval=0", "at least 1, or -1"),
        ("eval_steps=-2", "at least 1, or -1"),
        ("expansion_factor_real_data=0", "above 0, or -1"),
        ("dataset_type=netwrk", "one of network, grain, hf, tfds, c4_mlperf, synthetic, worlds, measured"),
        ("network_data_format=csv", "one of probe_chunks, network_parquet"),
        ("base_output_directory=", "a folder"),
        ("run_name=a/b", "a plain folder name"),
        ("run_name=..", "a plain folder name"),
    ],
)
def test_a_value_out_of_bounds_is_answered_with_the_bounds(setting: str, must: str) -> None:
    name = setting.partition("=")[0]
    assert refusal(None, setting).startswith(f"override '{setting}': {name} must be {must}, not ")


@pytest.mark.parametrize(
    "setting",
    [
        "steps=1",
        "max_target_length=64",
        "data_shuffle_seed=4294967295",
        "grain_worker_count=0",
        "grain_per_worker_buffer_size=1",
        "eval_steps=1",
        "per_device_batch_size=0.125",
        *(f"dataset_type={name}" for name in ("network", "grain", "hf", "tfds", "c4_mlperf", "synthetic")),
        "network_data_format=network_parquet",
    ],
)
def test_the_bounds_themselves_and_every_choice_are_allowed(setting: str) -> None:
    name, _, text = setting.partition("=")
    value = getattr(load_config(None, [setting]), name)
    assert value == type(value)(text)


def test_text_with_a_line_break_is_refused(write_yaml: WriteYaml) -> None:
    assert "run_name must be text without line breaks" in refusal(write_yaml("run_name: |\n  a\n  b\n"))


def test_evaluation_in_training_needs_evaluation_data() -> None:
    message = refusal(None, "eval_interval=100", "network_train_files=rows")
    assert "eval_interval is 100" in message
    assert "network_eval_files is empty" in message
    assert load_config(None, ["eval_interval=100", "network_eval_files=rows"]).eval_interval == 100
    assert load_config(None, ["eval_interval=100", "dataset_type=synthetic"]).eval_interval == 100


@pytest.mark.parametrize("setting", ["generate_padding_batch_train=true", "expansion_factor_real_data=2"])
def test_a_key_that_only_maxtext_reads_is_not_ignored_in_silence(setting: str) -> None:
    assert "is for the MaxText trainer (docs/maxtext.md)" in refusal(None, setting)


@pytest.mark.parametrize(
    "setting", ["packing=true", "packing=True", "use_truncation=no", "max_corpus_chars=1e7", "use_dpo=false"]
)
def test_a_key_of_maxtext_that_asks_for_what_is_done_anyway_is_passed_over(write_yaml: WriteYaml, setting: str) -> None:
    assert load_config(None, [setting]) == Config()
    assert load_config(write_yaml(setting.replace("=", ": "))) == Config()


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ("packing=false", "sequences are always packed"),
        ("grain_packing_type=first_fit", "packed best-fit"),
        ("use_truncation=true", "nothing is truncated"),
        ("tokenize_train_data=false", "grain_file_type=tokens"),
        ("grain_shuffle_buffer_size=100", "shuffle_window"),
        ("use_sft=true", "fine-tune with MaxText"),
    ],
)
def test_a_key_of_maxtext_that_asks_for_something_else_says_what_there_is_instead(setting: str, instead: str) -> None:
    name, message = setting.partition("=")[0], refusal(None, setting)
    assert message.startswith(f"override {setting!r}: {name} is a key of MaxText only: ")
    assert instead in message


def test_no_key_of_ours_is_taken_for_one_of_maxtext_only() -> None:
    assert not set(MAXTEXT_KEYS) & set(KEYS)


def test_data_other_than_text_is_always_shuffled() -> None:
    assert "enable_data_shuffling=false is for text" in refusal(None, "enable_data_shuffling=false")
    assert load_config(None, ["enable_data_shuffling=false", "dataset_type=hf"]).shuffle_seed is None


def test_a_list_of_columns_is_refused() -> None:
    assert "the name of one column" in refusal(None, "train_data_columns=['text']")


@pytest.mark.parametrize("name", ["network_train_files", "network_eval_files"])
def test_a_wrong_blend_is_found_when_the_configuration_is_loaded(name: str) -> None:
    assert f"{name}: 'b' has no weight" in refusal(None, f"{name}=a,1;b")


@pytest.mark.parametrize("override", ["steps", "", "=5", "  =5"])
def test_an_override_without_key_or_equals_sign_is_refused(override: str) -> None:
    assert refusal(None, override) == f"override {override!r}: write key=value"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("steps: 5\n\nsteps: 6\n", " line 3: 'steps' is set twice, first on line 1"),
        ("steps: 5\nnetwork:\n  train_files: a\n", " line 2: 'network' holds further keys"),
        ("steps: [5, 6]\n", " line 1: 'steps' holds a list"),
        ("run_name:\n", " line 1: 'run_name' has no value"),
        ("run_name: null\n", " line 1: 'run_name' has no value"),
        ("run_name: !env NAME\n", " line 1: 'run_name' has the tag '!env'"),
        ("? [a, b]\n: 5\n", " line 1: a key must be a plain word"),
        ("- steps: 5\n", ": not a configuration"),
        ("steps=5\n", ": not a configuration"),
        ("steps: 5\nrun_name: [a\n", " line 3: not valid YAML"),
        ("steps: 5\n\trun_name: a\n", " line 2: not valid YAML"),
        ("steps: 5\n---\nsteps: 6\n", " line 2: not valid YAML"),
        ('run_name: "\\UFFFFFFFF"\n', ": not valid YAML"),
        ("run_name: " + "[" * 3000, ": not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(write_yaml: WriteYaml, text: str, complaint: str) -> None:
    path = write_yaml(text)
    assert refusal(path).startswith(f"{path}{complaint}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert f"cannot read the configuration '{tmp_path}/no.yml': No such file" in refusal(tmp_path / "no.yml")
    assert "Is a directory" in refusal(tmp_path)
    (tmp_path / "latin1.yml").write_bytes("run_name: é\n".encode("latin-1"))
    assert "latin1.yml: not valid YAML" in refusal(tmp_path / "latin1.yml")


@IN_TMP_PATH
@given(st.one_of(st.binary(max_size=60), st.text("steps: 1\n-[]{}'\"!&*|>%@`#?,~\t\\xUu", max_size=60)))
@example(b"run_name: \xff")
@example('base_config: "a\\0b"')
def test_whatever_a_file_holds_loading_ends_in_a_config_or_one_line(tmp_path: Path, content: bytes | str) -> None:
    path = tmp_path / "any.yml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = ""
    try:
        load_config(path)
    except PingLlmError as error:
        message = str(error)
    assert len(message.splitlines()) <= 1


@pytest.mark.parametrize("key", ["skip_steps=3:5", "mixture_schedule=5: 1"])
@pytest.mark.parametrize("data", [("dataset_type=hf",), ("dataset_type=grain", "grain_file_type=parquet")])
def test_changes_at_steps_need_batches_that_are_a_function_of_them(key: str, data: tuple[str, ...]) -> None:
    assert "needs batches that are a function of their step" in refusal(None, *data, key)
