"""Configuration: where values come from, how they are read and checked, and what a mistake is answered with."""

import dataclasses
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from ping_llm.config import Config, KeyInfo, describe_keys, key_tables, load_config, parse_blend
from ping_llm.config.reference import updated
from ping_llm.errors import PingLlmError

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
IN_TMP_PATH = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

WriteYaml = Callable[..., Path]


@pytest.fixture
def write_yaml(tmp_path: Path) -> WriteYaml:
    def write(text: str, name: str = "run.yml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(path: Path | str | None, *overrides: str) -> str:
    """The message of the error that loading ends in. It must be one line."""
    with pytest.raises(PingLlmError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


# --- any valid configuration, made from the declarations ------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\u2028\u2029"), max_size=12)
AWKWARD = st.sampled_from(
    ["null", "~", "no", "007", "1e6", "- a", "#x", "a: b", " x ", "=", "<<", "'", '"', "!t", "\ufeff"]
)
BLEND = st.sampled_from(["rows", "a/*.arrayrecord", "a/*,0.3;b/*,0.7", "gs://b/x:1;C:\\y,2", " a:1 ; b:2 "])


def values_of(info: KeyInfo) -> st.SearchStrategy[Any]:
    by_kind: dict[type, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.one_of(st.integers(-1, 5000), st.integers(-(10**18) + 1, 10**18 - 1)),
        float: st.one_of(st.sampled_from([-1.0, 0.5, 8.0]), st.floats(allow_nan=False, allow_infinity=False)),
        str: st.one_of(TEXT, AWKWARD),
    }
    if info.rule is None:
        return by_kind[info.kind]
    if info.rule.text.startswith("one of "):
        return st.sampled_from(info.rule.text.removeprefix("one of ").split(", "))
    if info.name.endswith("_files"):
        return BLEND
    return by_kind[info.kind].filter(info.rule.accepts)


SOME_VALUES = st.fixed_dictionaries({}, optional={info.name: values_of(info) for info in describe_keys()})


@st.composite
def configs(draw: st.DrawFn) -> Config:
    values = draw(SOME_VALUES)
    if values.get("eval_interval", -1) > 0:
        values.setdefault("network_eval_files", "rows")
    return Config(**values)


# --- defaults, files, overrides -------------------------------------------------------------------------------------


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
    assert on == {"enable_checkpointing", "async_checkpointing", "enable_tensorboard"}


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


# --- reading values -------------------------------------------------------------------------------------------------


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


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("max_target_lenght", "max_target_length"),
        ("grain_worker_cout", "grain_worker_count"),
        ("eval-interval", "eval_interval"),
        ("--run_name", "run_name"),
        ("Steps", "steps"),
        ("grain_train_files", "network_train_files"),
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
        "expansion_factor_real_data=2",
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


# --- base_config ----------------------------------------------------------------------------------------------------


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


# --- the Config object ----------------------------------------------------------------------------------------------


@IN_TMP_PATH
@given(configs())
def test_every_configuration_survives_storing_and_loading(tmp_path: Path, config: Config) -> None:
    path = tmp_path / "stored.yml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(path) == config
    assert load_config(path).to_yaml() == config.to_yaml()


@settings(max_examples=150, deadline=None)
@given(configs())
def test_every_configuration_can_be_written_as_overrides(config: Config) -> None:
    overrides = [f"{name}={value}" for name, value in dataclasses.asdict(config).items()]
    assert load_config(None, overrides) == config


@settings(max_examples=100, deadline=None)
@given(configs(), SOME_VALUES)
def test_overrides_change_what_they_name_and_nothing_else(config: Config, changes: dict[str, Any]) -> None:
    assume(changes.get("eval_interval", config.eval_interval) < 0)
    before, after = dataclasses.asdict(config), dataclasses.asdict(config.replace(**changes))
    assert after == before | changes
    values = [f"{name}={value}" for name, value in (before | changes).items()]
    assert load_config(None, values) == config.replace(**changes)


def test_the_stored_form_has_every_key_and_is_plain_yaml() -> None:
    stored = yaml.safe_load(Config(run_name="007", steps=10**6).to_yaml())
    assert stored == dataclasses.asdict(Config(run_name="007", steps=10**6))
    assert list(stored) == [info.name for info in describe_keys()]


def test_a_config_cannot_be_changed_and_can_be_hashed_and_sent_to_a_process() -> None:
    config = Config(run_name="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run_name = "y"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    assert len({config, Config(run_name="x"), Config()}) == 2


def test_replace_makes_another_config_and_checks_it() -> None:
    config = Config(steps=5)
    assert config.replace(steps=6, run_name="x") == Config(steps=6, run_name="x")
    assert config.steps == 5
    with pytest.raises(PingLlmError, match="steps must be at least 1, not 0"):
        config.replace(steps=0)
    with pytest.raises(PingLlmError, match=r"unknown key 'stepz': did you mean steps"):
        config.replace(stepz=6)
    with pytest.raises(PingLlmError, match="network_eval_files is empty"):
        config.replace(eval_interval=5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 5.0},
        {"steps": True},
        {"steps": "5"},
        {"steps": 10**18},
        {"grain_debug_mode": 1},
        {"run_name": None},
        {"per_device_batch_size": float("nan")},
        {"per_device_batch_size": True},
        {"per_device_batch_size": 10**400},
    ],
)
def test_python_values_of_another_type_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PingLlmError, match=f"^{next(iter(wrong))} must be "):
        Config(**wrong)


# --- the declarations and their documentation -----------------------------------------------------------------------


def test_every_field_is_a_described_key_of_a_simple_type() -> None:
    infos = describe_keys()
    assert {info.name for info in infos} == {field.name for field in dataclasses.fields(Config)}
    assert len({info.name for info in infos}) == len(infos)
    for info in infos:
        assert info.kind is get_type_hints(Config)[info.name]
        assert type(info.default) is info.kind
        assert info.default == getattr(Config(), info.name)
        assert info.help.endswith(".")
        assert "\n" not in info.help
        assert "|" not in info.help  # it would break the table


def test_the_documentation_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == updated(page), "run: python -m ping_llm.config docs/configuration.md"


def test_the_tables_list_every_key_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|", key_tables(), flags=re.MULTILINE))
    shown = {name: "" if default == "empty" else default.strip("`") for name, default in rows.items()}
    assert set(shown) == {info.name for info in describe_keys()}
    assert load_config(None, [f"{name}={default}" for name, default in shown.items()]) == Config()


def test_a_stale_page_is_renewed_and_the_rest_of_it_kept(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    stale = tmp_path / "page.md"
    stale.write_text(page.replace("| `steps` |", "| `stepz` |"), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "ping_llm.config", str(stale)], check=True)
    assert stale.read_text(encoding="utf-8") == page


def test_the_command_prints_the_tables_and_refuses_a_page_without_a_place_for_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ping_llm.config"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == key_tables()
    other = tmp_path / "other.md"
    other.write_text("# Another page\n")
    refused = subprocess.run([*command, str(other)], check=False, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "no place for the keys" in refused.stderr
    assert other.read_text() == "# Another page\n"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yml")), ids=lambda path: path.name)
def test_every_config_file_loads_says_how_to_run_it_and_gives_no_default(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert load_config(path) != Config()
    assert f"--config configs/{path.name}" in text
    assert "What to expect" in text
    defaults = {info.name: info.default for info in describe_keys()}
    assert [name for name, value in yaml.safe_load(text).items() if defaults.get(name) == value] == []


# --- blends ---------------------------------------------------------------------------------------------------------


def whole(pattern: str) -> tuple[tuple[str, Fraction], ...]:
    return ((pattern, Fraction(1)),)


@pytest.mark.parametrize("text", ["a/*.arrayrecord,0.3;b/*.arrayrecord,0.7", "a/*.arrayrecord:0.3;b/*.arrayrecord:0.7"])
def test_a_blend_gives_each_pattern_its_share(text: str) -> None:
    assert parse_blend(text) == (("a/*.arrayrecord", Fraction(3, 10)), ("b/*.arrayrecord", Fraction(7, 10)))


def test_shares_are_normalised_exactly() -> None:
    assert parse_blend("a,1;b,1;c,1") == tuple((name, Fraction(1, 3)) for name in "abc")
    assert parse_blend("a,0.1;b,0.2") == parse_blend("a,1;b,2") == parse_blend("a:1e9;b:2E+9")
    assert parse_blend("a,.5;b,5.e-1") == (("a", Fraction(1, 2)), ("b", Fraction(1, 2)))


def test_one_pattern_is_the_whole_blend_with_or_without_a_weight() -> None:
    assert (
        parse_blend("data/rows") == parse_blend("data/rows,0.3") == parse_blend(" data/rows : 7 ") == whole("data/rows")
    )


def test_spaces_around_patterns_and_weights_are_ignored() -> None:
    assert parse_blend("  a b/* , 1 ;\n c : 3 ") == (("a b/*", Fraction(1, 4)), ("c", Fraction(3, 4)))


@pytest.mark.parametrize(
    "pattern",
    ["gs://bucket/rows", "gs://bucket/rows-12:30/train*", r"C:\rows\train*", "C:/rows", "C:rows", "s3://b/2024/*"],
)
def test_a_colon_inside_a_path_is_no_weight(pattern: str) -> None:
    assert parse_blend(pattern) == whole(pattern)
    for separator in ",:":
        assert parse_blend(f"{pattern}{separator}1;b:3") == ((pattern, Fraction(1, 4)), ("b", Fraction(3, 4)))


def test_a_name_that_ends_like_a_weight_is_kept_if_a_weight_follows() -> None:
    assert parse_blend("runs/12:30,1") == whole("runs/12:30")
    assert parse_blend("a,b/rows,1") == whole("a,b/rows")


def test_a_source_of_weight_zero_stays_in_the_blend() -> None:
    assert parse_blend("a,0;b,2") == (("a", Fraction(0)), ("b", Fraction(1)))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no files are given"),
        ("  ", "no files are given"),
        ("a,1;", "has an empty part"),
        ("a,1;;b,1", "has an empty part"),
        (";", "has an empty part"),
        (",1", "has no pattern"),
        (":1;b:1", "has no pattern"),
        ("a,x;b,1", "'x' in 'a,x' is not a weight"),
        ("a/*,b/*", "'b/*' in 'a/*,b/*' is not a weight"),
        ("rows:x;b:1", "'x' in 'rows:x' is not a weight"),
        ("a,;b,1", "'' in 'a,' is not a weight"),
        ("a,-1;b,2", "'-1' in 'a,-1' is not a weight"),
        ("a,nan;b,1", "'nan' in 'a,nan' is not a weight"),
        ("a,inf", "'inf' in 'a,inf' is not a weight"),
        ("a,1/3;b,1", "'1/3' in 'a,1/3' is not a weight"),
        ("a,1e999999999;b,1", "is not a weight"),
        ("a,0;b,0.0", "are all 0"),
        ("a,0", "are all 0"),
        ("a;b", "'a' has no weight"),
        ("a,1;b", "'b' has no weight"),
        ("a,1;b,2; a:3", "'a' is in the blend twice"),
    ],
)
def test_a_wrong_blend_is_refused_with_the_part_that_is_wrong(text: str, complaint: str) -> None:
    with pytest.raises(PingLlmError, match=re.escape(complaint)):
        parse_blend(text)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{2,6}(/[a-z*.]{1,8})?", fullmatch=True),
        st.decimals(0, 10**6, places=4).map(lambda weight: format(weight, "f")),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(",:"),
)
def test_shares_sum_to_one_and_keep_their_proportions(weights: dict[str, str], separator: str) -> None:
    exact = {pattern: Fraction(weight) for pattern, weight in weights.items()}
    assume(sum(exact.values()) > 0)
    blend = parse_blend(";".join(f"{pattern}{separator}{weight}" for pattern, weight in weights.items()))
    assert [pattern for pattern, _ in blend] == list(weights)
    assert sum(share for _, share in blend) == 1
    assert all(share * sum(exact.values()) == exact[pattern] for pattern, share in blend)
