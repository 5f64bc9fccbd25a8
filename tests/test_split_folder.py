"""A split as files: whole, read back exactly, and its training part ready to be prepared."""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import random_measurements
from ping_llm.core.errors import PingLlmError
from ping_llm.core.files import file_sha256, sealed, unsealed
from ping_llm.core.measurements import SCHEMA
from ping_llm.evaluate.split import PROTOCOLS, read_split, trained_on, write_split
from ping_llm.rows.measurement_set import MeasurementSet, read_observations, rows_observations
from ping_llm.rows.prepare import PrepareSettings, prepare
from split_fixtures import GENEROUS, equal, leaks, plain, random_world, without_times

WriteParquet = Callable[..., Path]


class TestFolder:
    @pytest.mark.parametrize(
        "world",
        [
            random_world(5_000),
            dataclasses.replace(random_world(5_000), nodes=tuple(f"2001:db8:{i:x}::1" for i in range(180))),
            without_times(random_world(5_000)),
        ],
        ids=["ipv4", "ipv6", "timeless"],
    )
    def test_is_read_back_exactly(self, tmp_path: Path, world: MeasurementSet) -> None:
        written = write_split(world, tmp_path / "a" / "split")
        found = read_split(tmp_path / "a" / "split")
        assert found.nodes == written.nodes == world.nodes
        assert str(found.cut_time_s) == str(written.cut_time_s)
        assert found.unused == written.unused
        assert list(found.questions) == list(written.questions)
        assert equal(found.train, written.train)
        assert equal(found.history, written.history)
        assert all(equal(found.questions[name], written.questions[name]) for name in written.questions)
        assert leaks(found) == []

    def test_numbers_that_the_schema_would_round_are_kept(self, tmp_path: Path) -> None:
        world = random_world(5_000)
        random = np.random.default_rng(0)
        fine = dataclasses.replace(
            world.observations, time_s=np.sort(random.random(5_000)), rtt_ms=random.lognormal(3, 1, 5_000)
        )
        written = write_split(dataclasses.replace(world, observations=fine), tmp_path / "split")
        assert equal(read_split(tmp_path / "split").history, written.history)

    def test_says_what_it_is(self, tmp_path: Path) -> None:
        written = write_split(random_world(5_000), tmp_path / "split", GENEROUS)
        description = json.loads((tmp_path / "split" / "split.json").read_text())
        assert description["settings"] == dataclasses.asdict(GENEROUS)
        assert description["cut_time_s"] == written.cut_time_s
        assert description["questions"] == {name: len(questions) for name, questions in written.questions.items()}
        asked = len(written.questions["unseen_pair"])
        assert description["history"] + asked + description["unused"] == 5_000
        assert sorted(p.name for p in tmp_path.iterdir()) == ["split"]

    def test_the_training_part_can_be_prepared(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        world = read_observations([write_parquet(random_measurements(20_000, whole_seconds=False))])
        written = write_split(world, tmp_path / "split")
        assert pq.read_schema(tmp_path / "split" / "train" / "measurements.parquet").equals(SCHEMA)
        inputs = (str(tmp_path / "split" / "train" / "*.parquet"),)
        prepare(PrepareSettings(inputs=inputs, output=tmp_path / "rows", train_ratio=1.0, workers=1))
        rows = rows_observations(tmp_path / "rows", "train")
        assert Counter(plain(rows.nodes, rows.observations)) == Counter(plain(written.nodes, written.train))
        assert trained_on(rows, written) == dict.fromkeys(PROTOCOLS, 0)

    def test_is_not_replaced_without_being_told(self, tmp_path: Path) -> None:
        write_split(random_world(5_000), tmp_path / "split")
        with pytest.raises(PingLlmError, match="already exists"):
            write_split(random_world(6_000), tmp_path / "split")
        assert len(read_split(tmp_path / "split").history) < 5_000
        write_split(random_world(6_000), tmp_path / "split", overwrite=True)
        assert len(read_split(tmp_path / "split").history) > 5_000
        assert sorted(p.name for p in tmp_path.iterdir()) == ["split"]

    def test_another_folder_is_never_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("all of it")
        with pytest.raises(PingLlmError, match="something else than a split"):
            write_split(random_world(5_000), tmp_path, overwrite=True)
        assert (tmp_path / "thesis.txt").exists()

    def test_is_whole_or_not_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = write_split(random_world(5_000), tmp_path / "split")

        def full(*_: Any) -> Any:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_text", full)  # of the description, which comes last
        for name in ("split", "new"):
            with pytest.raises(PingLlmError, match="No space left"):
                write_split(random_world(6_000), tmp_path / name, overwrite=True)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["split"]
        assert equal(read_split(tmp_path / "split").history, before.history)

    def test_what_is_no_split_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(PingLlmError, match="not a split"):
            read_split(tmp_path)
        write_split(random_world(5_000), tmp_path / "split")
        (tmp_path / "split" / "history.parquet").write_bytes(b"PAR1")
        with pytest.raises(PingLlmError, match="damaged"):
            read_split(tmp_path / "split")

    @pytest.mark.parametrize(
        ("name", "column", "value"),
        [
            ("nodes.parquet", "address", "not an address"),
            ("nodes.parquet", "address", None),
            ("history.parquet", "src_addr", "203.0.113.250"),
            ("history.parquet", "rtt", True),
            ("questions-unseen_pair.parquet", "rtt", -5.0),
            ("questions-unseen_pair.parquet", "rtt", float("inf")),
            ("history.parquet", "event_time", float("inf")),
        ],
    )
    def test_columns_that_no_split_can_have_are_one_line(
        self, tmp_path: Path, name: str, column: str, value: Any
    ) -> None:
        write_split(random_world(5_000), tmp_path / "split", GENEROUS)
        table = pq.read_table(tmp_path / "split" / name)
        spoiled = table.set_column(table.column_names.index(column), column, pa.array([value] * len(table)))
        pq.write_table(spoiled, tmp_path / "split" / name)
        file = tmp_path / "split" / "split.json"
        description = unsealed(json.loads(file.read_text()))
        description["files"][name] = file_sha256(tmp_path / "split" / name)  # as a stranger would
        file.write_text(json.dumps(sealed(description)))
        with pytest.raises(
            PingLlmError, match=r"is not a split, or is damaged|neither an address|the same address"
        ) as refused:
            read_split(tmp_path / "split")
        assert "\n" not in str(refused.value)

    @pytest.mark.parametrize(
        "change", [{"cut_time_s": "x"}, {"cut_time_s": float("nan")}, {"questions": 5}, {"format": []}]
    )
    def test_a_description_that_no_split_can_have_is_one_line(self, tmp_path: Path, change: dict[str, Any]) -> None:
        write_split(random_world(5_000), tmp_path / "split", GENEROUS)
        file = tmp_path / "split" / "split.json"
        file.write_text(json.dumps(sealed(unsealed(json.loads(file.read_text())) | change)))
        with pytest.raises(PingLlmError):
            read_split(tmp_path / "split")
        for text in ("[]", "{" * 100_000, '{"format": ' + "[" * 100_000):
            file.write_text(text)
            with pytest.raises(PingLlmError, match="is not a split, or is damaged"):
                read_split(tmp_path / "split")
