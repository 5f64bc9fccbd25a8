"""The Config object: any valid one is stored, loaded, overridden and replaced without loss."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from config_fixtures import IN_TMP_PATH
from ping_llm.config import Config, KeyInfo, describe_keys, load_config
from ping_llm.core.errors import PingLlmError

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


@st.composite
def some_values(draw: st.DrawFn) -> dict[str, Any]:
    """Of a few keys: with all of them, most examples would be larger than Hypothesis allows."""
    infos = draw(st.lists(st.sampled_from(describe_keys()), unique_by=lambda info: info.name, max_size=20))
    return {info.name: draw(values_of(info)) for info in infos}


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


@settings(max_examples=150, deadline=None)
@given(configs())
def test_every_configuration_can_be_written_as_overrides(config: Config) -> None:
    overrides = [f"{name}={value}" for name, value in dataclasses.asdict(config).items()]
    assert load_config(None, overrides) == config


@settings(max_examples=100, deadline=None)
@given(configs(), some_values())
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
