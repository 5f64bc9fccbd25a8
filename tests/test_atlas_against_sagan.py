"""The importer agrees with RIPE NCC's own parser, on every result of a real dump and on old firmware."""

import bz2
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from ripe.atlas.sagan import PingResult, Result

from ping_llm.sources.atlas import ImportReport, import_atlas
from ping_llm.sources.atlas_results import read_ping

SHARED = Path(os.environ.get("PING_LLM_SHARED_DATA") or Path(__file__).parents[1].parent / "shared" / "data")
DUMP = SHARED / "ripe-atlas-ping-menog.jsonl.bz2"
needs_dump = pytest.mark.skipif(
    not DUMP.exists(), reason=f"the real dump {DUMP.name} is not there; PING_LLM_SHARED_DATA names its folder"
)

RESULTS = 346_176
ANSWERS = 968_086
DUPLICATE_ANSWERS = 3_895
UNANSWERED_PACKETS = 68_983 + 13  # timeouts and errors
WITHOUT_ANSWER = 21_745
WITH_DUPLICATE_ANSWERS_ONLY = 115


def sagan(result: Any) -> PingResult:
    quiet = {"on_error": Result.ACTION_IGNORE, "on_malformation": Result.ACTION_IGNORE}
    return Result.get(result, **quiet)


def sagan_minimum(parsed: PingResult) -> float | None:
    """Minimum over the packets that sagan takes its median of; firmware 1 has no packets, only the minimum itself."""
    if not parsed.packets:
        minimum: float | None = parsed.rtt_min
        return minimum
    return min((p.rtt for p in parsed.packets if p.rtt is not None and not p.dup), default=None)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImportReport, Any]:
    output = tmp_path_factory.mktemp("atlas") / "min"
    report = import_atlas([DUMP], output)
    return report, pq.read_table(output)


@needs_dump
@pytest.mark.slow
class TestRealDump:
    def test_every_result_is_read_and_none_dropped(self, imported: tuple[ImportReport, Any]) -> None:
        report, table = imported
        assert (report.results, report.measurements, report.dropped) == (RESULTS, RESULTS, {})
        assert len(table) == RESULTS
        assert len(table.column("dst_addr").unique()) == 240
        assert len(table.column("src_addr").unique()) == 831

    def test_failed_are_the_results_without_an_answer_in_time(self, imported: tuple[ImportReport, Any]) -> None:
        report, table = imported
        # An answer after the timeout is marked as a duplicate, and then `rcvd` is 0: the probe counts it as failed too.
        assert report.failed == WITHOUT_ANSWER + WITH_DUPLICATE_ANSWERS_ONLY
        assert table.column("rtt").null_count == report.failed
        assert round(100 * report.failed / report.results, 1) == 6.3

    def test_each_packet_but_the_duplicates_is_a_measurement(self, tmp_path: Path) -> None:
        report = import_atlas([DUMP], tmp_path / "each", packets="each")
        assert report.measurements - report.failed == ANSWERS - DUPLICATE_ANSWERS
        assert report.failed == UNANSWERED_PACKETS
        assert report.dropped == {}

    @pytest.mark.slow
    def test_every_result_agrees_with_sagan(self, imported: tuple[ImportReport, Any]) -> None:
        _, table = imported
        times, origins, destinations, versions, minima, probes = [], [], [], [], [], set()
        with bz2.open(DUMP, "rt") as lines:
            for line in lines:
                parsed = sagan(line)
                times.append(parsed.created_timestamp)
                origins.append(parsed.origin)
                destinations.append(parsed.destination_address)
                versions.append(parsed.af)
                minima.append(sagan_minimum(parsed))
                probes.add(parsed.probe_id)

        assert len(times) == RESULTS
        assert len(probes) == 132
        assert [
            int(moment) for moment in np.array(table.column("event_time")).astype("datetime64[s]").astype(int)
        ] == times
        assert table.column("src_addr").to_pylist() == origins
        assert table.column("dst_addr").to_pylist() == destinations
        assert table.column("ip_version").to_pylist() == versions
        ours = table.column("rtt").to_numpy()
        theirs = np.array(minima, dtype=np.float64)  # None becomes NaN
        assert np.array_equal(np.isnan(ours), np.isnan(theirs))
        # sagan rounds to microseconds, and a float32 has 24 bits.
        np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=0.00051)


COMMON: dict[str, Any] = {"msm_id": 1000047, "prb_id": 165, "timestamp": 1332938930, "type": "ping"}
FIRMWARE: dict[str, dict[str, Any]] = {
    "1, only a summary": COMMON
    | {"fw": 1, "from": "203.0.113.50", "addr": "192.0.2.16", "name": "example.net", "size": 56}
    | {"min": 19.938, "avg": 20.126, "max": 20.3, "dup": 0, "sent": 3, "rcvd": 3},
    "1, nothing came back": COMMON
    | {"fw": 1, "from": "203.0.113.50", "addr": "192.0.2.16", "name": "example.net", "size": 56}
    | {"min": -1, "avg": -1, "max": -1, "dup": 0, "sent": 3, "rcvd": 0},
    "4400, IPv6 by mode": COMMON
    | {"fw": 4400, "from": "2001:db8:2::9", "srcaddr": "2001:db8:2::9", "addr": "2001:db8:7fd::1", "mode": "ICMP6"}
    | {"name": "example.net", "result": [{"rtt": 2.217}, {"rtt": 2.104}, {"rtt": 2.196}], "ttl": 58}
    | {"min": 2.104, "avg": 2.172, "max": 2.217, "dup": 0, "sent": 3, "rcvd": 3, "size": 20},
    "4430, pf": COMMON
    | {"fw": 4430, "from": "203.0.113.9", "srcaddr": "192.168.3.8", "addr": "192.0.2.129", "pf": 4, "proto": "ICMP"}
    | {
        "name": "example.net",
        "result": [{"x": "*"}, {"rtt": "8.73"}, {"rtt": 8.9, "dup": 1}, {"rtt": 9.07, "ttl": 50}],
    },
    "4460, both spellings": COMMON
    | {"fw": 4460, "from": "203.0.113.9", "src_addr": "192.168.3.8", "addr": "192.0.2.129", "dst_addr": "192.0.2.129"}
    | {"af": 4, "name": "example.net", "dst_name": "example.net", "proto": "ICMP", "size": 20, "dup": 0}
    | {"result": [{"rtt": 31.1, "srcaddr": "192.0.2.130"}, {"rtt": 30.944, "src_addr": "192.0.2.129"}, {"rtt": 31.7}]},
    "4480, every packet lost": COMMON
    | {"fw": 4480, "from": "203.0.113.9", "src_addr": "192.168.3.8", "dst_addr": "192.0.2.129", "af": 4}
    | {"proto": "ICMP", "size": 20, "result": [{"x": "*"}, {"x": "*"}, {"error": "sendto failed: No route to host"}]},
    "4570, the answer came too late": COMMON
    | {"fw": 4570, "from": "203.0.113.9", "src_addr": "192.168.3.8", "dst_addr": "192.0.2.129", "af": 4, "lts": 46}
    | {"proto": "ICMP", "size": 12, "result": [{"x": "*"}, {"x": "*"}, {"dup": 1, "rtt": 1840.1}, {"x": "*"}]},
    "4610, IPv6": COMMON
    | {"fw": 4610, "from": "2001:db8::a", "src_addr": "2001:db8::a", "dst_addr": "2001:db8:40::8", "af": 6, "lts": 9}
    | {"proto": "ICMP", "size": 1000, "step": 240, "result": [{"rtt": 110.412845}, {"rtt": 110.299}, {"rtt": 111}]},
    "5080, no family": COMMON
    | {"fw": 5080, "mver": "2.6.2", "from": "203.0.113.9", "src_addr": "10.1.2.3", "dst_addr": "192.0.2.129"}
    | {"proto": "ICMP", "size": 64, "result": [{"rtt": 0.0}, {"rtt": 0.412}, {"rtt": 0.398}]},
}


class TestOldFirmware:
    @pytest.mark.parametrize("name", FIRMWARE)
    def test_every_spelling_agrees_with_sagan(self, name: str) -> None:
        result = FIRMWARE[name]
        ours, theirs = read_ping(result, each_packet=False), sagan(json.dumps(result))
        assert ours.source == theirs.origin
        assert ours.destination == theirs.destination_address
        assert ours.ip_version == theirs.af
        assert ours.time_us == theirs.created_timestamp * 1_000_000
        assert ours.rtts == [_close_to(sagan_minimum(theirs))]

    @pytest.mark.parametrize("name", [name for name, result in FIRMWARE.items() if "result" in result])
    def test_every_packet_agrees_with_sagan(self, name: str) -> None:
        result = FIRMWARE[name]
        ours, theirs = read_ping(result, each_packet=True), sagan(json.dumps(result))
        assert ours.rtts == [_close_to(packet.rtt) for packet in theirs.packets if not packet.dup]

    @pytest.mark.parametrize("name", FIRMWARE)
    def test_the_type_may_be_missing_as_it_was_at_the_time(self, name: str) -> None:
        result = FIRMWARE[name] | {"sent": 3, "rcvd": FIRMWARE[name].get("rcvd", 3)}
        without = {key: value for key, value in result.items() if key != "type"}
        assert read_ping(without, each_packet=False) == read_ping(result, each_packet=False)


def _close_to(rtt: float | None) -> Any:
    return None if rtt is None else pytest.approx(rtt, abs=0.00051)
