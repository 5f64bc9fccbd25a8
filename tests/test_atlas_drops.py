"""Atlas results that cannot be used: each is dropped under its reason, or stops a strict import."""

import json
from pathlib import Path
from typing import Any

import pytest

from atlas_fixtures import ABSENT, TIME, as_lines, ping
from ping_llm.core.errors import MeasurementError
from ping_llm.core.measurements import MAX_RTT_MS
from ping_llm.sources.atlas import DROP_REASONS, import_atlas
from ping_llm.sources.atlas import stream as atlas_stream

FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("not_ping", {"type": "traceroute"}),
    ("not_ping", {"type": "dns"}),
    ("not_ping", {"type": 7}),
    ("not_ping", {"type": ABSENT, "msm_name": "Traceroute"}),
    ("not_ping", {"type": ABSENT, "msm_name": ABSENT, "rcvd": ABSENT}),
    ("missing_time", {"timestamp": ABSENT}),
    ("missing_time", {"timestamp": None}),
    ("bad_time", {"timestamp": "1557653294"}),
    ("bad_time", {"timestamp": True}),
    ("bad_time", {"timestamp": -1}),
    ("bad_time", {"timestamp": TIME * 1000}),
    ("missing_source", {"from": ABSENT}),
    ("missing_source", {"from": "", "src_addr": ABSENT}),
    ("missing_source", {"from": "", "src_addr": "not an address"}),
    ("bad_src_addr", {"from": "198.51.100"}),
    ("bad_src_addr", {"from": "198.51.100.1 "}),
    ("bad_src_addr", {"from": ["198.51.100.1"]}),
    ("missing_destination", {"dst_addr": ABSENT, "result": [{"error": "name resolution failed"}]}),
    ("missing_destination", {"dst_addr": ""}),
    ("bad_dst_addr", {"dst_addr": "example.org"}),
    ("bad_dst_addr", {"dst_addr": 3221225985}),
    ("family_mismatch", {"from": "2001:db8::1"}),
    ("family_mismatch", {"dst_addr": "2001:db8::1"}),
    ("family_mismatch", {"af": 6}),
    ("malformed_packets", {"result": "traceroute to example.org"}),
    ("malformed_packets", {"result": [20.5]}),
    ("bad_rtt", {"result": [{"rtt": 20.5}, {"rtt": -0.1}]}),
    ("bad_rtt", {"result": [{"rtt": "NaN"}]}),
    ("bad_rtt", {"result": [{"rtt": "fast"}]}),
    ("bad_rtt", {"result": [{"rtt": None}]}),
    ("bad_rtt", {"result": [{"rtt": True}]}),
    ("bad_rtt", {"result": ABSENT, "min": ABSENT}),
    ("absurd_rtt", {"result": [{"rtt": MAX_RTT_MS + 1}]}),
    ("absurd_rtt", {"result": [{"rtt": "Infinity"}]}),
    ("no_packets", {"result": [], "sent": 0}),
    ("no_packets", {"result": ABSENT, "rcvd": "?"}),
    ("no_packets", {"result": [{"rtt": 20.5, "dup": 1}]}),
]
UNUSABLE: list[tuple[str, bytes]] = [
    ("malformed_json", b'{"af": 4, "dst_ad'),
    ("malformed_json", b'{"rtt": NaN}'),
    ("malformed_json", b'{"name": "\xff"}'),
    ("not_a_result", b"[1, 2]"),
    ("not_a_result", b'"ping"'),
    *((reason, json.dumps(ping(**changes)).encode()) for reason, changes in FAULTS),
]


class TestDrops:
    @pytest.mark.parametrize(("reason", "line"), UNUSABLE)
    def test_an_unusable_result_is_dropped_under_its_reason(self, tmp_path: Path, reason: str, line: bytes) -> None:
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping()]) + line + b"\n" + as_lines([ping()]))
        report = import_atlas([file], tmp_path / "out")
        assert (report.results, report.measurements, report.dropped) == (3, 2, {reason: 1})
        assert report.examples[reason].startswith(f"{file}:2: ")

    @pytest.mark.parametrize(("reason", "line"), UNUSABLE)
    def test_strict_names_file_line_and_reason(self, tmp_path: Path, reason: str, line: bytes) -> None:
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping()]) + b"\n" + line + b"\n")
        with pytest.raises(MeasurementError) as error:
            import_atlas([file], tmp_path / "out", strict=True)
        assert str(error.value).startswith(f"{file}:3: {reason}: ")
        assert "\n" not in str(error.value)
        assert not (tmp_path / "out").exists()

    def test_every_reason_is_tested_and_documented(self) -> None:
        documented = (Path(__file__).parents[1] / "docs" / "atlas.md").read_text()
        assert {reason for reason, _ in UNUSABLE} == set(DROP_REASONS)
        assert [reason for reason in DROP_REASONS if f"`{reason}`" not in documented] == []

    def test_an_element_of_an_array_is_named_by_its_number(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(atlas_stream, "BLOCK_BYTES", 1000)
        file = tmp_path / "in.json"
        file.write_text(json.dumps([*[ping()] * 50, ping(type="dns"), ping(timestamp=None)], indent=1))
        for chunk_bytes in (100, 2000, 1 << 20):
            report = import_atlas([file], tmp_path / f"{chunk_bytes}", chunk_bytes=chunk_bytes)
            assert report.examples["not_ping"].startswith(f"{file} element 51: ")
            assert report.examples["missing_time"].startswith(f"{file} element 52: ")
        with pytest.raises(MeasurementError, match=" element 51: not_ping"):
            import_atlas([file], tmp_path / "strict", strict=True)

    def test_a_bad_value_inside_an_array_element_costs_that_element_only(self, tmp_path: Path) -> None:
        file = tmp_path / "in.json"
        file.write_text(f"[{json.dumps(ping())}, {{'x': 1}}, {json.dumps(ping())}]")
        report = import_atlas([file], tmp_path / "out")
        assert (report.results, report.measurements, report.dropped) == (3, 2, {"malformed_json": 1})

    def test_each_packet_needs_packets(self, tmp_path: Path) -> None:
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping(result=ABSENT), ping()]))
        report = import_atlas([file], tmp_path / "out", packets="each")
        assert (report.measurements, report.dropped) == (3, {"no_packets": 1})

    def test_a_cut_off_last_line_is_dropped(self, tmp_path: Path) -> None:
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping(), ping()])[:-20])
        assert import_atlas([file], tmp_path / "out").dropped == {"malformed_json": 1}
