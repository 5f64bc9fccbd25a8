"""One RIPE Atlas result: source, destination, family, time and RTTs, of any firmware."""

from typing import Any

import pytest

from atlas_fixtures import ABSENT, TIME, ping
from ping_llm.core.measurements import MAX_RTT_MS
from ping_llm.sources.atlas.parse import Unusable, read_ping


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
