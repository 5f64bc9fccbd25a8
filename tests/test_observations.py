"""Observations of any source: measurement files, RIPE Atlas results, prepared rows."""

import bz2
import gzip
import json
from collections import Counter
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from conftest import random_measurements
from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import SCHEMA
from ping_llm.evaluate.split import split
from ping_llm.rows.measurement_set import read_observations, rows_observations
from ping_llm.rows.prepare import PrepareSettings, TaskSizes, prepare
from ping_llm.sources.columns import InputOptions
from split_fixtures import Measurement, leaks, plain

WriteParquet = Callable[..., Path]


def rows_of(table: pa.Table) -> Counter[Measurement]:
    times = (table["event_time"].cast(pa.int64()).to_numpy() / 1e6).tolist()
    return Counter(
        zip(*(table[c].to_pylist() for c in ("src_addr", "dst_addr")), times, table["rtt"].to_pylist(), strict=True)
    )


def atlas_result(source: str, destination: str, at: int, *packets: dict[str, Any]) -> dict[str, Any]:
    named = {"fw": 5000, "type": "ping", "prb_id": 1, "msm_id": 2, "af": ip_address(source).version}
    return {**named, "from": source, "dst_addr": destination, "timestamp": at, "result": list(packets)}


ATLAS = [
    atlas_result("192.0.2.1", "198.51.100.7", 1_700_000_000, {"rtt": 12.5}, {"rtt": 11.5}),
    atlas_result("2001:db8::5", "2001:DB8:0::9", 1_699_999_999, {"x": "*"}),
]


class TestReading:
    @pytest.mark.parametrize("whole_seconds", [True, False])
    def test_files_and_prepared_rows_give_every_measurement(
        self, tmp_path: Path, write_parquet: WriteParquet, whole_seconds: bool
    ) -> None:
        table = random_measurements(20_000, whole_seconds=whole_seconds)
        path = write_parquet(table, row_group_size=3_000)
        found = read_observations([path])
        assert Counter(plain(found.nodes, found.observations)) == rows_of(table)
        prepare(PrepareSettings(inputs=(str(path),), output=tmp_path / "rows", workers=1, max_row_bytes=4096))
        parts = [rows_observations(tmp_path / "rows", name) for name in ("train", "eval")]
        assert sum((Counter(plain(p.nodes, p.observations)) for p in parts), Counter[Measurement]()) == rows_of(table)
        for part in (found, *parts):
            assert (np.diff(part.observations.time_s) >= 0).all()

    def test_rows_of_several_shards_and_of_times_decades_apart_are_read(
        self, tmp_path: Path, write_parquet: WriteParquet
    ) -> None:
        table = random_measurements(10_000, whole_seconds=False)
        late = pa.array(np.where(np.arange(10_000) % 7, 0, 10**15))
        times = pa.compute.add(table["event_time"].cast(pa.int64()), late).cast(SCHEMA.field("event_time").type)
        table = table.set_column(0, SCHEMA.field("event_time"), times)
        inputs, sizes = (str(write_parquet(table)),), TaskSizes(shard_measurements=2_000)
        prepare(PrepareSettings(inputs=inputs, output=tmp_path / "rows", workers=1, train_ratio=1.0, sizes=sizes))
        assert len(list((tmp_path / "rows").glob("*.arrayrecord"))) > 1
        found = rows_observations(tmp_path / "rows", "train", batch_rows=700)
        assert Counter(plain(found.nodes, found.observations)) == rows_of(table)

    def test_a_split_without_rows_has_no_measurements(self, tmp_path: Path, write_parquet: WriteParquet) -> None:
        path = write_parquet(random_measurements(500))
        prepare(PrepareSettings(inputs=(str(path),), output=tmp_path / "rows", workers=1, train_ratio=1.0))
        assert len(rows_observations(tmp_path / "rows", "eval").observations) == 0

    def test_nodes_are_numbered_by_address_however_files_are_cut(self, write_parquet: WriteParquet) -> None:
        table = random_measurements(3_000)
        whole = read_observations([write_parquet(table)])
        parts = [write_parquet(table.slice(i, 1_000), f"parts/{9 - i // 1000}.parquet") for i in (0, 1_000, 2_000)]
        cut = read_observations([str(parts[0].parent / "*.parquet")])
        assert whole.nodes == cut.nodes
        assert list(whole.nodes) == sorted(whole.nodes, key=lambda n: (ip_address(n).version, ip_address(n).packed))
        assert Counter(plain(whole.nodes, whole.observations)) == Counter(plain(cut.nodes, cut.observations))

    def test_equal_times_stay_in_the_order_of_the_input(self, write_parquet: WriteParquet) -> None:
        table = random_measurements(2_000).set_column(4, "rtt", pa.array(np.arange(1.0, 2_001.0), pa.float32()))
        at = np.where(np.arange(2_000) % 2, 1_700_000_000, 1_600_000_000)
        column = pa.array(at * 1_000_000, SCHEMA.field("event_time").type)
        found = read_observations([write_parquet(table.set_column(0, SCHEMA.field("event_time"), column))])
        sources = table["src_addr"].to_pylist()
        assert [m[0] for m in plain(found.nodes, found.observations)] == sources[::2] + sources[1::2]

    def test_addresses_of_equal_bytes_but_different_families_are_different_nodes(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text(
            "event_time,src_addr,dst_addr,rtt\n1,2001:db8::,::1,1\n2,32.1.13.184,200.0.0.1,2\n3,32.1.13.184,0.0.0.1,3\n"
        )
        found = read_observations([tmp_path / "a.csv"])
        assert found.nodes == ("0.0.0.1", "32.1.13.184", "200.0.0.1", "::1", "2001:db8::")
        assert found.observations.source.tolist() == [4, 1, 1]
        assert found.observations.destination.tolist() == [3, 2, 0]

    def test_csv_with_other_column_names_is_read_and_unusable_rows_are_counted(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text(
            "when,src,dst,duration\n2024-01-01T00:00:02Z,10.0.0.1,10.0.0.2,7.5\n1704067201,10.0.0.2,10.0.0.1,\n"
            "1704067201,10.0.0,10.0.0.1,3\n"
        )
        told: list[float] = []
        found = read_observations(
            [tmp_path / "a.csv"],
            options=InputOptions(columns={"event_time": "when", "rtt": "duration"}, allow_bad_rows=True),
            on_progress=lambda amount=1, *, total=None: told.append(amount),
        )
        assert plain(found.nodes, found.observations) == [
            ("10.0.0.2", "10.0.0.1", 1_704_067_201.0, None),
            ("10.0.0.1", "10.0.0.2", 1_704_067_202.0, 7.5),
        ]
        assert found.nodes == ("10.0.0.1", "10.0.0.2")
        assert found.dropped == {"bad_src_addr": 1}
        assert sum(told) == 3

    @pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz", "a.json.bz2", "ping-2024-05-01T0000.bz2"])
    def test_atlas_results_are_read(self, tmp_path: Path, name: str) -> None:
        lines = json.dumps(ATLAS) if ".json." in f"{name}." else "\n".join(json.dumps(result) for result in ATLAS)
        packed = lines.encode()
        if name.endswith(("gz", "bz2")):
            packed = gzip.compress(packed) if name.endswith("gz") else bz2.compress(packed)
        (tmp_path / name).write_bytes(packed)
        found = read_observations([tmp_path / name])
        assert plain(found.nodes, found.observations) == [
            ("2001:db8::5", "2001:db8::9", 1_699_999_999.0, None),
            ("192.0.2.1", "198.51.100.7", 1_700_000_000.0, 11.5),
        ]

    def test_nothing_usable_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("event_time,src_addr,dst_addr,rtt\n,10.0.0.1,10.0.0.2,7.5\n")
        with pytest.raises(PingLlmError, match="missing_time"):
            read_observations([tmp_path / "a.csv"])

    @pytest.mark.slow
    def test_the_real_atlas_set_splits_without_leaks(self, shared_data: Path) -> None:
        world = read_observations([shared_data / "ripe-atlas-ping-menog.jsonl.bz2"])
        found = split(world)
        assert leaks(found) == []
        assert {"unseen_pair", "seen_pair"} <= set(found.questions)
