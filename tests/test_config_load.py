"""Where values come from: defaults, files and the files they start from, overrides."""

import pytest

from config_fixtures import WriteYaml, refusal
from ping_llm.config import Config, describe_keys, load_config


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
    on = {info.name for info in describe_keys() if info.kind is bool and getattr(config, info.name)}
    always = {"enable_checkpointing", "async_checkpointing", "enable_tensorboard"}
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
