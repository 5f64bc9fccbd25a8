"""Where values come from (defaults, files and the files they start from, overrides), and how their text is read."""

import pytest

from config_fixtures import WriteYaml, refusal
from ping_llm.config import KEYS, Config, load_config


def test_without_a_file_every_key_has_its_default() -> None:
    assert load_config(None, []) == Config()


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing but a comment\n", "---\n", "{}\n"])
def test_an_empty_file_means_all_defaults(write_yaml: WriteYaml, text: str) -> None:
    assert load_config(write_yaml(text)) == Config()


def test_the_defaults_are_the_documented_ones() -> None:
    config = Config()
    assert (config.dataset_type, config.network_data_format) == ("network", "probe_chunks")
    assert (config.network_context_measurements, config.network_max_contexts) == (30, 16)
    assert (config.max_target_length, config.grain_ram_budget_mb, config.data_shuffle_seed) == (1024, 4096, 0)
    assert (config.grain_worker_count, config.grain_per_worker_buffer_size) == (-1, -1)
    assert (config.eval_interval, config.eval_steps, config.expansion_factor_real_data) == (-1, -1, -1.0)
    assert (config.run_name, config.base_output_directory) == ("", "runs")
    assert config.network_train_files == config.network_eval_files == config.grain_visualization_dir == ""
    on = {name for name, field in KEYS.items() if field.annotation is bool and getattr(config, name)}
    always = {"enable_checkpointing", "async_checkpointing", "enable_tensorboard", "enable_data_shuffling"}
    assert on == always | {"add_bos", "add_eos"}


def test_a_file_changes_what_it_names_and_nothing_else(write_yaml: WriteYaml) -> None:
    path = write_yaml("steps: 7\nnetwork_train_files: data/rows\ngrain_debug_mode: true\n")
    assert load_config(path) == Config(steps=7, network_train_files="data/rows", grain_debug_mode=True)
    assert load_config(str(path)) == load_config(path)


def test_an_override_wins_over_the_file_and_the_last_one_over_the_others(write_yaml: WriteYaml) -> None:
    path = write_yaml("steps: 7\nmax_target_length: 256\n")
    config = load_config(path, ["steps=8", "run_name=x", "steps=9"])
    assert config == Config(steps=9, max_target_length=256, run_name="x")


def test_a_value_that_is_replaced_later_is_checked_all_the_same(write_yaml: WriteYaml) -> None:
    path = write_yaml("steps: 0\n")
    assert refusal(path, "steps=5") == f"{path} line 1: steps must be at least 1, not 0"


def test_a_file_can_start_from_another_one_beside_it(write_yaml: WriteYaml, monkeypatch: pytest.MonkeyPatch) -> None:
    write_yaml("steps: 1\nrun_name: root\nmax_target_length: 128\n", "shared/root.yml")
    write_yaml("base_config: root.yml\nsteps: 2\n", "shared/middle.yml")
    top = write_yaml("run_name: top\nbase_config: ../shared/middle.yml  # last, and still the base\n", "mine/top.yml")
    monkeypatch.chdir(top.parent)
    assert load_config("top.yml") == Config(steps=2, run_name="top", max_target_length=128)
    assert load_config("top.yml", ["steps=3"]).steps == 3


def test_a_mistake_in_a_base_is_reported_where_it_is(write_yaml: WriteYaml) -> None:
    base = write_yaml("run_name: x\nstep: 1\n", "base.yml")
    top = write_yaml("base_config: base.yml\n")
    assert refusal(top).startswith(f"{base} line 2: unknown key 'step'")


def test_a_missing_base_is_reported_with_the_line_that_asks_for_it(write_yaml: WriteYaml) -> None:
    top = write_yaml("steps: 1\nbase_config: gone.yml\n")
    assert refusal(top).startswith(f"{top} line 2: cannot read the configuration '{top.parent}/gone.yml'")


def test_bases_that_lead_in_a_circle_are_refused(write_yaml: WriteYaml, monkeypatch: pytest.MonkeyPatch) -> None:
    write_yaml("base_config: ./b.yml\n", "a.yml")
    write_yaml("base_config: sub/../c.yml\n", "b.yml")
    path = write_yaml("base_config: a.yml\n", "c.yml")
    (path.parent / "sub").mkdir()
    monkeypatch.chdir(path.parent)
    chain = "c.yml -> a.yml -> b.yml -> sub/../c.yml"
    assert refusal("c.yml") == f"b.yml line 1: base_config leads in a circle: {chain}"


def test_a_base_cannot_be_an_override() -> None:
    assert "base_config belongs in a configuration file" in refusal(None, "base_config=a.yml")


@pytest.mark.parametrize(
    ("text", "value"),
    [("5", 5), ("1_000", 1000), ("1e6", 1_000_000), ("1.5e3", 1500), ("2.0", 2), ("+3", 3), ("010", 10), (" 4 ", 4)],
)
def test_integers_may_be_grouped_or_scientific(write_yaml: WriteYaml, text: str, value: int) -> None:
    assert load_config(None, [f"steps={text}"]).steps == value
    assert load_config(write_yaml(f"steps: {text}\n")).steps == value


@pytest.mark.parametrize("text", ["", "many", "1.5", "1e-3", "0x10", "nan", "inf", "true", "1,000", "1 2"])
def test_what_is_no_integer_is_refused_and_never_rounded(text: str) -> None:
    assert refusal(None, f"steps={text}") == f"override 'steps={text}': steps must be an integer, not {text!r}"


@pytest.mark.parametrize("text", ["1e18", "9" * 30, "1e999999999", "-1e999999", "1e400"])
def test_an_integer_of_any_length_is_refused_at_once(text: str) -> None:
    assert "steps must be " in refusal(None, f"steps={text}")


@pytest.mark.parametrize(("text", "value"), [("64", 64.0), ("0.25", 0.25), ("1e-3", 0.001), ("1_0.5", 10.5)])
def test_numbers_may_be_whole_or_fractions(write_yaml: WriteYaml, text: str, value: float) -> None:
    config = load_config(None, [f"per_device_batch_size={text}"])
    assert config == load_config(write_yaml(f"per_device_batch_size: {text}\n"))
    assert config.per_device_batch_size == value
    assert type(config.per_device_batch_size) is float


@pytest.mark.parametrize("text", ["", "big", "nan", "inf", "1e400", "0x1"])
def test_what_is_no_finite_number_is_refused(text: str) -> None:
    assert "per_device_batch_size must be a number, not" in refusal(None, f"per_device_batch_size={text}")


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("True", True), ("yes", True), ("on", True), ("FALSE", False), ("no", False)]
)
def test_flags_are_true_or_false(write_yaml: WriteYaml, text: str, value: bool) -> None:
    start = f"grain_debug_mode: {not value}\n"
    assert load_config(write_yaml(start), [f"grain_debug_mode={text}"]).grain_debug_mode is value
    assert load_config(write_yaml(f"grain_debug_mode: {text}\n")).grain_debug_mode is value


@pytest.mark.parametrize("text", ["", "1", "0", "t", "truely"])
def test_a_flag_is_never_guessed(text: str) -> None:
    assert f"grain_debug_mode must be true or false, not {text!r}" in refusal(None, f"grain_debug_mode={text}")


@pytest.mark.parametrize("text", ["007", "1e6", "no", "true", "2024-01-01", "1_000", "a=b", "=", "ü – 測"])
def test_text_stays_as_it_stands_even_if_it_looks_like_something_else(write_yaml: WriteYaml, text: str) -> None:
    assert load_config(None, [f"run_name={text}"]).run_name == text
    assert load_config(write_yaml(f'run_name: "{text}"\n')).run_name == text
    if text != "=":  # which YAML reserves
        assert load_config(write_yaml(f"run_name: {text}\n")).run_name == text


def test_an_override_can_empty_a_text(write_yaml: WriteYaml) -> None:
    assert load_config(write_yaml("run_name: x\n"), ["run_name="]).run_name == ""


def test_an_alias_stands_for_its_value(write_yaml: WriteYaml) -> None:
    config = load_config(write_yaml("network_train_files: &rows data/rows\nnetwork_eval_files: *rows\n"))
    assert config.network_eval_files == config.network_train_files == "data/rows"
