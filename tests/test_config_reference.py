"""The declarations of the keys, their documentation, and the configurations of the repository."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from config_fixtures import ROOT
from ping_llm.config import Config, describe_keys, key_tables, load_config
from ping_llm.config.load import updated

PAGE = ROOT / "docs" / "configuration.md"


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
