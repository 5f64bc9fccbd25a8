"""One RIPE Atlas result, of any firmware; one that cannot be used is dropped under its reason, or stops the import."""

import json
from pathlib import Path
from typing import Any

import pytest

from atlas_fixtures import ABSENT, TIME, as_lines, ping
from ping_llm.core.errors import MeasurementError
from ping_llm.core.measurements import MAX_RTT_MS
from ping_llm.sources.atlas import import_atlas
from ping_llm.sources.atlas_results import DROP_REASONS, Unusable, read_ping
from ping_llm.sources.objects import ReadSizes


def rtts(result: dict[str, Any], each_packet: bool = False) -> list[float | None]:
    return read_ping(result, each_packet=each_packet).rtts


class TestOneResult:
    def test_the_source_is_the_address_the_controller_saw(self) -> None:
        assert read_ping(ping(), each_packet=False)[:4] == (TIME * 1_000_000, "198.51.100.1", "192.0.2.7", 4)

    @pytest.mark.parametrize("missing", [ABSENT, "", None])
    @pytest.mark.parametrize("key", ["src_addr", "srcaddr"])
    def test_a_public_own_address_stands_in_for_a_missing_from(self, missing: object, key: str) -> None:
        result = ping(**{"from": missing, "src_addr": ABSENT, key: "9.9.9.9"})
        assert read_ping(result, each_packet=False).source == "9.9.9.9"

    @pytest.mark.parametrize("own", ["10.0.0.2", "192.168.1.1", "100.64.0.9", "169.254.0.1", "fe80::1", "fd00::1"])
    def test_a_private_own_address_does_not(self, own: str) -> None:
        with pytest.raises(Unusable, match="missing_source"):
            read_ping(ping(**{"from": "", "src_addr": own}), each_packet=False)

    def test_addresses_are_spelled_the_usual_way(self) -> None:
        result = ping(**{"from": "2001:DB8:0:0::1", "dst_addr": "2001:0db8::0002", "af": 6})
        assert read_ping(result, each_packet=False)[1:4] == ("2001:db8::1", "2001:db8::2", 6)

    @pytest.mark.parametrize("af", [ABSENT, None, "4", "x"])
    def test_the_family_is_taken_from_the_addresses(self, af: object) -> None:
        assert read_ping(ping(af=af), each_packet=False).ip_version == 4

    def test_the_default_is_the_minimum(self) -> None:
        assert rtts(ping()) == [20.5]

    def test_every_packet_can_be_a_measurement(self) -> None:
        result = ping(result=[{"rtt": 3.0}, {"x": "*"}, {"error": "sendto failed"}, {"rtt": 1.0, "ttl": 50}])
        assert rtts(result, each_packet=True) == [3.0, None, None, 1.0]

    def test_a_duplicate_is_neither_the_minimum_nor_a_measurement(self) -> None:
        result = ping(result=[{"rtt": 3.0}, {"rtt": 1.0, "dup": 1}, {"rtt": 2.0}])
        assert rtts(result) == [2.0]
        assert rtts(result, each_packet=True) == [3.0, 2.0]

    def test_no_answer_is_a_failed_measurement(self) -> None:
        assert rtts(ping(result=[{"x": "*"}, {"error": "no route"}, {"x": "*"}])) == [None]

    def test_an_answer_after_the_timeout_is_a_duplicate_so_the_ping_failed(self) -> None:
        assert rtts(ping(result=[{"x": "*"}, {"dup": 1, "rtt": 2185.5}, {"x": "*"}])) == [None]

    @pytest.mark.parametrize(("rtt", "expected"), [("12.3", 12.3), (12, 12.0), (0, 0.0), (MAX_RTT_MS, MAX_RTT_MS)])
    def test_numbers_in_quotes_and_whole_numbers_are_accepted(self, rtt: object, expected: float) -> None:
        assert rtts(ping(result=[{"rtt": rtt}])) == [expected]

    @pytest.mark.parametrize("packets", [ABSENT, [], None])
    def test_without_a_packet_list_the_summary_tells_the_minimum(self, packets: object) -> None:
        assert rtts(ping(result=packets)) == [20.5]
        assert rtts(ping(result=packets, rcvd=0, min=-1)) == [None]

    def test_nothing_sent_is_no_measurement(self) -> None:
        with pytest.raises(Unusable, match="no_packets"):
            read_ping(ping(result=[], sent=0, rcvd=0, min=-1), each_packet=False)

    def test_a_fraction_of_a_second_is_kept(self) -> None:
        assert read_ping(ping(timestamp=TIME + 0.25), each_packet=False).time_us == TIME * 1_000_000 + 250_000

    @pytest.mark.parametrize("kind", [{"type": "PING"}, {"type": ABSENT}, {"type": ABSENT, "msm_name": ABSENT}])
    def test_a_ping_is_known_by_type_or_name_or_packet_counts(self, kind: dict[str, Any]) -> None:
        assert rtts(ping(**kind)) == [20.5]


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

    def test_an_element_of_an_array_is_named_by_its_number(self, tmp_path: Path) -> None:
        file = tmp_path / "in.json"
        file.write_text(json.dumps([*[ping()] * 50, ping(type="dns"), ping(timestamp=None)], indent=1))
        for chunk in (100, 2000, 1 << 20):
            report = import_atlas([file], tmp_path / f"{chunk}", workers=1, sizes=ReadSizes(chunk=chunk, block=1000))
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
