"""Rows that were damaged, or made by a stranger: one line or the right batch, never a crash and never another batch."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from conftest import random_measurements
from ping_llm.core.errors import PingLlmError
from ping_llm.rows.dataset import RowSet
from ping_llm.rows.manifest import Manifest
from ping_llm.rows.prepare import TaskSizes
from pipeline_fixtures import histories, prepare_table

HOSTILE: list[Any] = [
    "../x",
    "/etc/passwd",
    "abc/../../../file",
    "a\0b",
    "\ud800",
    "x" * 5000,
    "a\nb",
    "",
    -1,
    2**63,
    10**400,
    1e308,
    True,
    None,
    [],
    {},
    {"a": {"b": []}},
    [[[[]]]],
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    table = pa.concat_tables([random_measurements(400, sources=12), histories([300, 4], family=6)])
    made = prepare_table(table, sizes=TaskSizes(shard_measurements=500)).folder
    return Path(shutil.copytree(made, tmp_path / "rows"))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from leaves(inner, (*path, key))


def test_a_hostile_manifest_is_one_line_and_reaches_no_other_file(rows: Path, tmp_path: Path) -> None:
    original = json.loads((rows / "manifest.json").read_text())
    secret = tmp_path / "x"
    secret.write_text("mine")
    chance = random.Random(3)
    for path in [path for path in leaves(original) if path]:
        for hostile in chance.sample(HOSTILE, 5):
            changed = json.loads(json.dumps(original))
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = hostile
            (rows / "manifest.json").write_text(json.dumps(changed))
            said = ""
            try:
                with RowSet(rows) as opened:
                    assert all("/" not in name and name not in {"", ".", ".."} for name in opened.info.files)
                    opened.column("count")
            except PingLlmError as error:
                said = str(error)
            assert said.isprintable(), (path, hostile)
    assert secret.read_text() == "mine"


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe", b'{"kind": NaN', b"[]", b"9" * 10_000, b"null"])
def test_what_is_no_manifest_is_one_line(rows: Path, content: bytes) -> None:
    (rows / "manifest.json").write_bytes(content)
    with pytest.raises(PingLlmError) as caught:
        Manifest.load(rows)
    assert "\n" not in str(caught.value)
