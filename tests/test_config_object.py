"""Any valid Config is stored, loaded, overridden and replaced without loss; every key is documented."""

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from config_fixtures import IN_TMP_PATH, ROOT
from ping_llm.config import KEYS, Config, load_config
from ping_llm.config.__main__ import key_tables, maxtext_table
from ping_llm.config.keys import MAXTEXT_ONLY
from ping_llm.core.errors import PingLlmError

TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\u2028\u2029"), max_size=12)
AWKWARD = st.sampled_from(
    ["null", "~", "no", "007", "1e6", "- a", "#x", "a: b", " x ", "=", "<<", "'", '"', "!t", "\ufeff"]
)
BLEND = st.sampled_from(["rows", "a/*.arrayrecord", "a/*,0.3;b/*,0.7", "gs://b/x:1;C:\\y,2", " a:1 ; b:2 "])
OF_STEPS = {
    "mixture_schedule": st.sampled_from(["", "20_000: 0.2,0.8", " 5:1 ; 7: .5,1e2,0"]),
    "skip_steps": st.sampled_from(["", "10_240:10_260", "1:2, 7:9"]),
}

PAGE = ROOT / "docs" / "configuration.md"


def values_of(name: str) -> st.SearchStrategy[Any]:
    by_kind: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.one_of(st.integers(-1, 5000), st.integers(-(10**18) + 1, 10**18 - 1)),
        float: st.one_of(st.sampled_from([-1.0, 0.5, 8.0]), st.floats(allow_nan=False, allow_infinity=False)),
        str: st.one_of(TEXT, AWKWARD),
    }
    kind, rules = KEYS[name].annotation, KEYS[name].metadata
    if not rules:
        return by_kind[kind]
    if rules[0].text.startswith("one of "):
        return st.sampled_from(rules[0].text.removeprefix("one of ").split(", "))
    if name.endswith("_files"):
        return BLEND
    if name in OF_STEPS:
        return OF_STEPS[name]
    return by_kind[kind].filter(rules[0].accepts)


@st.composite
def some_values(draw: st.DrawFn) -> dict[str, Any]:
    """Of a few keys: with all of them, most examples would be larger than Hypothesis allows."""
    names = [name for name in KEYS if name not in (*MAXTEXT_ONLY, "enable_data_shuffling", "skip_documents")]
    chosen = draw(st.lists(st.sampled_from(names), unique=True, max_size=20))
    if "dataset_type" in chosen:  # most know no steps
        chosen = [name for name in chosen if name not in OF_STEPS]
    return {name: draw(values_of(name)) for name in chosen}


@st.composite
def configs(draw: st.DrawFn) -> Config:
    values = draw(some_values())
    if values.get("eval_interval", -1) > 0:
        values.setdefault("network_eval_files", "rows")
    return Config(**values)


@IN_TMP_PATH
@given(configs())
def test_every_configuration_survives_storing_and_loading(tmp_path: Path, config: Config) -> None:
    path = tmp_path / "stored.yml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(path) == config.replace(hf_access_token="")
    assert load_config(path).to_yaml() == config.to_yaml()


def test_secrets_are_not_stored() -> None:
    config = Config(hf_access_token="hf_secret")
    assert "hf_secret" not in config.to_yaml()
    assert "hf_secret" not in config.to_store().values()


@settings(max_examples=60, deadline=None)
@given(configs())
def test_every_configuration_can_be_written_as_overrides(config: Config) -> None:
    overrides = [f"{name}={value}" for name, value in config.model_dump().items()]
    assert load_config(None, overrides) == config


@settings(max_examples=50, deadline=None)
@given(configs(), some_values())
def test_overrides_change_what_they_name_and_nothing_else(config: Config, changes: dict[str, Any]) -> None:
    try:
        changed = config.replace(**changes)
    except PingLlmError:  # keys that do not go together
        reject()
    expected = config.model_dump() | changes
    assert changed.model_dump() == expected
    assert load_config(None, [f"{name}={value}" for name, value in expected.items()]) == changed


def test_the_stored_form_has_every_key_and_is_plain_yaml() -> None:
    stored = yaml.safe_load(Config(run_name="007", steps=10**6).to_yaml())
    assert stored == Config(run_name="007", steps=10**6).model_dump()
    assert list(stored) == list(KEYS)


def test_a_config_cannot_be_changed_and_can_be_hashed_and_sent_to_a_process() -> None:
    config = Config(run_name="x")
    with pytest.raises(ValidationError, match="frozen"):
        config.run_name = "y"
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


def test_every_key_has_a_simple_type_a_default_of_it_and_one_line_of_help() -> None:
    assert set(KEYS) == set(Config.model_fields)
    for name, field in KEYS.items():
        assert type(field.default) is field.annotation, name
        assert field.default == getattr(Config(), name)
        assert str(field.description).endswith(".")
        assert "\n" not in str(field.description)
        assert "|" not in str(field.description)  # it would break the table


def test_the_documentation_is_up_to_date() -> None:
    for page, name, table in (
        (PAGE, "keys", key_tables()),
        (PAGE.with_name("coming-from-maxtext.md"), "maxtext", maxtext_table()),
    ):
        _, _, found = page.read_text(encoding="utf-8").partition(f"<!-- {name}: written by `make config-page` -->\n\n")
        assert found.partition(f"\n<!-- end of {name} -->")[0] == table, "run: make config-page"


def test_the_tables_list_every_key_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|", key_tables(), flags=re.MULTILINE))
    shown = {name: "" if default == "empty" else default.strip("`") for name, default in rows.items()}
    assert set(shown) == set(KEYS)
    assert load_config(None, [f"{name}={default}" for name, default in shown.items()]) == Config()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yml")), ids=lambda path: path.name)
def test_every_config_file_loads_says_how_to_run_it_and_gives_no_default(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert load_config(path) != Config()
    assert f"--config configs/{path.name}" in text
    assert "What to expect" in text
    assert [name for name, value in yaml.safe_load(text).items() if name in KEYS and KEYS[name].default == value] == []
