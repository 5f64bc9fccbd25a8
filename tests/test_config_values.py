"""How the text of a value is read: integers, numbers, flags, text."""

import pytest

from config_fixtures import WriteYaml, refusal
from ping_llm.config import load_config


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
