"""The RIPE Atlas importer: what it reads, what it drops, what it leaves on disk."""

import bz2
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ping_llm.errors import MeasurementError, PingLlmError
from ping_llm.measurements import MAX_RTT_MS, SCHEMA
from ping_llm.sources.atlas import DROP_REASONS, import_atlas
from ping_llm.sources.atlas import stream as atlas_stream
from ping_llm.sources.atlas.array import array_as_lines
from ping_llm.sources.atlas.chunk import parse_chunk
from ping_llm.sources.atlas.output import ROWS_PER_GROUP, MeasurementWriter
from ping_llm.sources.atlas.result import Unusable, read_ping
from ping_llm.sources.atlas.stream import read_chunks
from ping_llm.workers import map_in_order, worker_pool

TIME = 1_557_653_294
ABSENT = object()
Row = tuple[Any, ...]


def ping(**changes: Any) -> dict[str, Any]:
    """A result as current firmware writes it, with some fields changed or left out."""
    result = {
        "af": 4,
        "dst_addr": "192.0.2.7",
        "dst_name": "example.org",
        "dup": 0,
        "from": "198.51.100.1",
        "fw": 5020,
        "min": 20.5,
        "msm_id": 1,
        "msm_name": "Ping",
        "prb_id": 2,
        "rcvd": 3,
        "result": [{"rtt": 21.5}, {"rtt": 20.5}, {"rtt": 22.5}],
        "sent": 3,
        "src_addr": "10.0.0.2",
        "timestamp": TIME,
        "type": "ping",
    } | changes
    return {key: value for key, value in result.items() if value is not ABSENT}


def rtts(result: dict[str, Any], each_packet: bool = False) -> list[float | None]:
    return read_ping(result, each_packet=each_packet).rtts


def as_lines(results: list[Any]) -> bytes:
    return b"".join(json.dumps(result).encode() + b"\n" for result in results)


def written(folder: Path) -> list[Row]:
    tables = [pq.read_table(file) for file in sorted(folder.glob("*.parquet"))]
    return [tuple(row.values()) for table in tables for row in table.to_pylist()]


def visible(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


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


ADDRESSES = {4: ["192.0.2.1", "198.51.100.7", "8.8.8.8"], 6: ["2001:db8::1", "2001:db8:5::9"]}
PACKETS = st.one_of(
    st.floats(0, 1000).map(lambda rtt: {"rtt": rtt}),
    st.floats(0, 1000).map(lambda rtt: {"rtt": rtt, "dup": 1}),
    st.just({"x": "*"}),
    st.text(max_size=8).map(lambda text: {"error": text}),
)


@st.composite
def any_result(draw: st.DrawFn) -> dict[str, Any]:
    version = draw(st.sampled_from([4, 6]))
    address = st.sampled_from(ADDRESSES[version])
    first = draw(st.floats(0, 1000).map(lambda rtt: {"rtt": rtt}) | st.just({"x": "*"}))
    result = ping(
        **{"from": draw(address), "dst_addr": draw(address), "af": version},
        timestamp=draw(st.integers(10**9, 2 * 10**9)),
        dst_name=draw(st.text(st.sampled_from('a"\\{}[],\n\u00e9\U0001f40c'), max_size=12)),
        result=[first, *draw(st.lists(PACKETS, max_size=3))],
    )
    if draw(st.booleans()):  # as before firmware 4460
        result = {{"dst_addr": "addr", "af": "pf", "dst_name": "name"}.get(k, k): v for k, v in result.items()}
    return result


ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda data: data,
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "bz2 in two streams": lambda data: bz2.compress(data[: len(data) // 2]) + bz2.compress(data[len(data) // 2 :]),
    "gz in two members": lambda data: gzip.compress(data[: len(data) // 3]) + gzip.compress(data[len(data) // 3 :]),
}
LAYOUTS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "lines": as_lines,
    "lines of UTF-8": lambda results: "\n".join(json.dumps(r, ensure_ascii=False) for r in results).encode(),
    "CRLF and blank lines": lambda results: b"\r\n" + as_lines(results).replace(b"\n", b"\r\n\r\n"),
    "lines after a byte order mark": lambda results: b"\xef\xbb\xbf" + as_lines(results),
    "array on one line": lambda results: json.dumps(results, separators=(",", ":")).encode(),
    "pretty array": lambda results: b"\n " + json.dumps(results, indent=4, ensure_ascii=False).encode() + b"\n\n",
    "array of CRLF lines": lambda results: (
        b"\xef\xbb\xbf[" + as_lines(results).replace(b"\n", b",\r\n")[:-3] + b"]\r\n"
    ),
    "two arrays": lambda results: json.dumps(results[:1]).encode() + b"\n" + json.dumps(results[1:]).encode(),
}


class TestContainers:
    @settings(max_examples=150, deadline=None)
    @given(
        results=st.lists(any_result(), min_size=1, max_size=6),
        encoding=st.sampled_from(sorted(ENCODINGS)),
        layout=st.sampled_from(sorted(LAYOUTS)),
        chunk_bytes=st.sampled_from([1, 50, 1000, 1 << 22]),
        block_bytes=st.integers(1, 400),
        each_packet=st.booleans(),
    )
    def test_any_container_holds_the_same_measurements(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        results: list[dict[str, Any]],
        encoding: str,
        layout: str,
        chunk_bytes: int,
        block_bytes: int,
        each_packet: bool,
    ) -> None:
        file = tmp_path_factory.mktemp("container") / "in"
        file.write_bytes(ENCODINGS[encoding](LAYOUTS[layout](results)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(atlas_stream, "BLOCK_BYTES", block_bytes + 3)
            chunks = list(read_chunks(file, chunk_bytes=chunk_bytes))
        parsed = [parse_chunk(chunk, each_packet=each_packet) for chunk in chunks]
        expected = [read_ping(result, each_packet=each_packet) for result in results]

        table = pa.Table.from_batches([chunk.batch for chunk in parsed])
        assert [chunk.dropped for chunk in parsed if chunk.dropped] == []
        assert sum(chunk.results for chunk in parsed) == len(results)
        assert table.column("src_addr").to_pylist() == [p.source for p in expected for _ in p.rtts]
        assert table.column("dst_addr").to_pylist() == [p.destination for p in expected for _ in p.rtts]
        assert table.column("ip_version").to_pylist() == [p.ip_version for p in expected for _ in p.rtts]
        assert table.column("event_time").cast(pa.int64()).to_pylist() == [p.time_us for p in expected for _ in p.rtts]
        assert table.column("rtt").equals(pa.chunked_array([pa.array(p.rtts, pa.float32()) for p in expected]))

    @settings(max_examples=300, deadline=None)
    @given(
        elements=st.lists(st.recursive(st.text('"\\{}[],a') | st.integers(), st.lists, max_leaves=5), max_size=4),
        size=st.integers(1, 9),
    )
    def test_an_array_is_cut_exactly_between_its_elements(self, elements: list[Any], size: int) -> None:
        text = json.dumps(elements, indent=1).encode()
        blocks = [text[i : i + size] for i in range(0, len(text), size)]
        lines = b"".join(array_as_lines(blocks, "name")).split(b"\n")
        assert [json.loads(line) for line in lines if line.strip()] == elements

    def test_the_kind_is_told_by_content_not_by_name(self, tmp_path: Path) -> None:
        file = tmp_path / "results.json"
        file.write_bytes(bz2.compress(as_lines([ping()])))
        assert import_atlas([file], tmp_path / "out").measurements == 1

    def test_memory_does_not_grow_with_the_file(self, tmp_path: Path) -> None:
        small, large = tmp_path / "small.gz", tmp_path / "large.gz"
        element = as_lines([ping()]).strip()
        small.write_bytes(gzip.compress(b"[" + element + (b"," + element) * 40_000 + b"]", 1))
        large.write_bytes(gzip.compress(b"[" + element + (b"," + element) * 200_000 + b"]", 1))
        script = (
            "import sys; from resource import RUSAGE_SELF, getrusage\n"
            "from ping_llm.sources.atlas import import_atlas\n"
            "for file in sys.argv[1:]:\n"
            "    import_atlas([file], file + '.out', workers=1)\n"
            "    print(getrusage(RUSAGE_SELF).ru_maxrss)\n"
        )
        run = subprocess.run(
            [sys.executable, "-c", script, str(small), str(large)], capture_output=True, check=True, text=True
        )
        peak_of_small, peak_of_both = map(int, run.stdout.split())
        assert (peak_of_both - peak_of_small) / 1024 < 20  # MB; the large array has 76 MB


class TestBadFiles:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "the file is empty"),
            (b"\n \r\n", "the file is empty"),
            (bz2.compress(b""), "the file is empty"),
            (gzip.compress(b"\n"), "the file is empty"),
            (b"<html><body>502</body></html>", "not RIPE Atlas JSON: it starts with b'<html><b'"),
            (b"time,src,dst,rtt\n1,2,3,4\n", "not RIPE Atlas JSON"),
            (b"{{ template }}\n{ body }\n", "not RIPE Atlas JSON.* none of 2 is valid JSON"),
            (json.dumps(ping(), indent=2).encode(), "not RIPE Atlas JSON"),
            (b"\xfd7zXZ\x00abc", "is xz-compressed"),
            (b"\x28\xb5\x2f\xfdabc", "is zstd-compressed"),
            (b"PK\x03\x04abc", "is a zip archive"),
            (b"PAR1abc", "is a Parquet file"),
            (bz2.compress(as_lines([ping()]) * 99)[:-9], r"compressed data is cut off \(read \d+ of \d+ bytes\)"),
            (gzip.compress(as_lines([ping()]) * 99)[:-9], r"compressed data is cut off \(read \d+ of \d+ bytes\)"),
            (bz2.compress(as_lines([ping()])) + b"garbage", "compressed data is damaged"),
            (gzip.compress(as_lines([ping()])) + b"garbage", "compressed data is damaged"),
            (bz2.compress(as_lines([ping()])).replace(b"1AY&SY", b"1AY&SX"), "compressed data is damaged"),
            (gzip.compress(as_lines([ping()]))[:-8] + b"\0" * 8, "compressed data is damaged"),
            (json.dumps([ping(), ping()]).encode()[:-1], "array is cut off or damaged after element 1"),
            (json.dumps([ping(), ping()]).encode()[:-40], "array is cut off or damaged after element 1"),
            (b'[{"a": 1]}, {"a": 2}]', "brackets do not match"),
            (b'[{"a": 1}]]', "brackets do not match"),
            (b'[{"a": 1}] {"a": 2}', "brackets do not match"),
            (b"[]", "no ping measurement in 0 results"),
            (as_lines([ping(type="dns")] * 4), r"no ping measurement in 4 results \(not_ping 4\)"),
        ],
    )
    def test_one_line_says_what_is_wrong_and_nothing_is_left(
        self, tmp_path: Path, content: bytes, message: str
    ) -> None:
        file = tmp_path / "in"
        file.write_bytes(content)
        with pytest.raises(PingLlmError, match=message) as error:
            import_atlas([file], tmp_path / "out")
        assert "\n" not in str(error.value)
        assert visible(tmp_path) == ["in"]

    def test_a_missing_file_a_folder_a_file_given_twice_and_no_file(self, tmp_path: Path) -> None:
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping()]))
        for files, message in [
            ([file, tmp_path / "missing.json"], "missing.json: no such file"),
            ([tmp_path], "is not a file but a folder"),
            ([file, tmp_path / "." / "in.json"], "given twice"),
            ([], "no input file"),
        ]:
            with pytest.raises(PingLlmError, match=message):
                import_atlas(files, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_line_without_end_is_refused_before_it_fills_the_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(atlas_stream, "MAX_RESULT_BYTES", 1 << 20)
        monkeypatch.setattr(atlas_stream, "BLOCK_BYTES", 1 << 16)
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping()]) + b'{"a": "' + b"x" * (3 << 20))
        with pytest.raises(PingLlmError, match="line 2 is over 1,048,576 bytes"):
            import_atlas([file], tmp_path / "out", chunk_bytes=1 << 16)

    def test_bad_options_are_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping()]))
        bad: list[dict[str, Any]] = [{"packets": "max"}, {"workers": 0}, {"rows_per_file": 0}]
        for options in bad:
            with pytest.raises(PingLlmError, match="must be"):
                import_atlas([file], tmp_path / "out", **options)


@pytest.fixture
def many_files(tmp_path: Path) -> list[Path]:
    """Three files of different kinds with some bad results in them."""
    contents = []
    for first in range(3):
        results = [
            ping(
                **{"from": f"198.51.100.{i % 200}"},
                timestamp=TIME + i,
                result=[{"rtt": i / 8}, {"x": "*"}] if i % 7 else [{"x": "*"}],
                **({"type": "dns"} if i % 50 == first else {}),
            )
            for i in range(first, 3000)
        ]
        contents.append(results)
    files = [tmp_path / "a.bz2", tmp_path / "b.gz", tmp_path / "c.json"]
    files[0].write_bytes(bz2.compress(as_lines(contents[0])))
    files[1].write_bytes(gzip.compress(as_lines(contents[1])))
    files[2].write_text(json.dumps(contents[2]))
    return files


class TestOutput:
    def test_files_have_the_measurement_schema_dictionaries_and_zstd(self, tmp_path: Path) -> None:
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping(), ping(result=[{"x": "*"}])]))
        import_atlas([file], tmp_path / "out")
        assert visible(tmp_path / "out") == ["measurements-00000.parquet"]
        parquet = pq.ParquetFile(tmp_path / "out" / "measurements-00000.parquet")
        assert parquet.schema_arrow.equals(SCHEMA)
        columns = [parquet.metadata.row_group(0).column(i) for i in range(5)]
        assert {column.compression for column in columns} == {"ZSTD"}
        assert {c.path_in_schema for c in columns if c.has_dictionary_page} == {"src_addr", "dst_addr"}
        moment = datetime.fromtimestamp(TIME, UTC)
        assert written(tmp_path / "out") == [
            (moment, "198.51.100.1", "192.0.2.7", 4, 20.5),
            (moment, "198.51.100.1", "192.0.2.7", 4, None),
        ]

    def test_the_bytes_do_not_depend_on_workers_or_chunks(
        self, tmp_path: Path, many_files: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def imported(name: str, files: list[Path], **options: Any) -> dict[str, bytes]:
            import_atlas(files, tmp_path / name, rows_per_file=2000, **options)
            return {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}

        alone = imported("one", many_files, workers=1)
        assert sorted(alone) == [f"measurements-{i:05d}.parquet" for i in range(5)]
        monkeypatch.setattr(atlas_stream, "BLOCK_BYTES", 5000)
        assert imported("small chunks", many_files, workers=1, chunk_bytes=5000) == alone
        assert imported("by file", many_files, workers=2, chunk_bytes=77777) == alone
        assert imported("by chunk", many_files[:1], workers=2, chunk_bytes=77777) == imported(
            "one file", many_files[:1], workers=1
        )

    def test_files_and_row_groups_have_their_exact_size_however_the_batches_are_cut(self, tmp_path: Path) -> None:
        rows = ROWS_PER_GROUP + 2007
        times = pa.array(range(TIME, TIME + rows), pa.int64()).cast(SCHEMA.field("event_time").type)
        text = pa.array([f"198.51.100.{i * i % 251}" for i in range(rows)])
        ones = pa.array([4] * rows, pa.int8())
        batch = pa.RecordBatch.from_arrays([times, text, text, ones, ones.cast(pa.float32())], schema=SCHEMA)
        contents = []
        for number, cuts in enumerate([[], [1, 5000, 5000, 23_456, ROWS_PER_GROUP + 1], list(range(0, rows, 977))]):
            folder = tmp_path / str(number)
            folder.mkdir()
            with MeasurementWriter(folder, rows_per_file=ROWS_PER_GROUP + 1000) as writer:
                for start, end in pairwise([0, *cuts, rows]):
                    writer.write(batch.slice(start, end - start))
            files = [folder / f"{name}.tmp" for name in writer.names]
            contents.append([file.read_bytes() for file in files])
        assert contents[0] == contents[1] == contents[2]
        metadata = [pq.ParquetFile(file).metadata for file in files]
        groups = [[one.row_group(i).num_rows for i in range(one.num_row_groups)] for one in metadata]
        assert groups == [[ROWS_PER_GROUP, 1000], [1007]]

    def test_measurements_already_there_are_kept_unless_overwriting(self, tmp_path: Path) -> None:
        file, out = tmp_path / "in.json", tmp_path / "out"
        file.write_bytes(as_lines([ping(), ping()]))
        import_atlas([file], out, rows_per_file=1)
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        with pytest.raises(PingLlmError, match="already holds measurements"):
            import_atlas([file], out, packets="each")
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        import_atlas([file], out, packets="each", overwrite=True)
        assert visible(out) == ["measurements-00000.parquet"]
        assert len(written(out)) == 6

    def test_a_failed_overwrite_keeps_what_was_there(self, tmp_path: Path) -> None:
        file, bad, out = tmp_path / "in.json", tmp_path / "bad.json", tmp_path / "out"
        file.write_bytes(as_lines([ping()]))
        bad.write_bytes(as_lines([ping(), ping(type="dns")]))
        import_atlas([file], out)
        with pytest.raises(MeasurementError):
            import_atlas([bad], out, overwrite=True, strict=True)
        assert len(written(out)) == 1

    def test_other_files_in_the_folder_are_left_alone(self, tmp_path: Path) -> None:
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping()]))
        import_atlas([file], tmp_path)
        assert visible(tmp_path) == ["in.json", "measurements-00000.parquet"]

    def test_an_output_that_is_a_file_or_cannot_be_written_is_one_line(self, tmp_path: Path) -> None:
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping()]))
        with pytest.raises(PingLlmError, match="is a file"):
            import_atlas([file], file)
        with pytest.raises(PingLlmError, match="cannot be written"):
            import_atlas([file], file / "folder")

    def test_two_imports_into_one_folder_at_a_time_are_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping()]))
        refused: list[object] = []

        def second_import(amount: float = 1, *, total: float | None = None) -> None:
            if total is None and not refused:
                with pytest.raises(PingLlmError, match="another import") as error:
                    import_atlas([file], tmp_path / "out")
                refused.append(error)

        assert import_atlas([file], tmp_path / "out", on_progress=second_import).measurements == 1
        assert refused

    def test_a_killed_import_leaves_nothing_that_looks_finished_and_the_next_one_cleans_up(
        self, tmp_path: Path
    ) -> None:
        file, out = tmp_path / "in.json", tmp_path / "out"
        file.write_bytes(as_lines([ping()] * 100))
        script = (
            "import os, signal, sys; from ping_llm.sources.atlas import import_atlas\n"
            "def die(amount, *, total=None):\n"
            "    if amount: os.kill(os.getpid(), signal.SIGKILL)\n"
            "import_atlas(sys.argv[1:2], sys.argv[2], workers=1, rows_per_file=9, on_progress=die)\n"
        )
        killed = subprocess.run([sys.executable, "-c", script, str(file), str(out)], timeout=60)
        assert killed.returncode == -signal.SIGKILL
        left = visible(out)
        assert [name for name in left if name.endswith(".tmp")]  # it was in the middle of writing
        assert [name for name in left if name.endswith(".parquet")] == []
        assert import_atlas([file], out).measurements == 100
        assert visible(out) == ["measurements-00000.parquet"]


class TestReport:
    @pytest.mark.parametrize("workers", [1, 2])
    @pytest.mark.parametrize("packets", ["min", "each"])
    def test_every_result_is_in_the_output_or_in_the_drops(
        self, tmp_path: Path, many_files: list[Path], workers: int, packets: Any
    ) -> None:
        report = import_atlas(many_files, tmp_path / "out", workers=workers, packets=packets)
        rows = written(tmp_path / "out")
        assert report.results == 3000 + 2999 + 2998
        assert report.dropped == {"not_ping": 180}
        assert report.kept == report.results - 180
        assert report.measurements == len(rows)
        assert report.failed == sum(row[-1] is None for row in rows)
        if packets == "min":
            assert report.measurements == report.kept
        for name in ("results", "measurements", "failed", "bytes"):
            assert getattr(report, name) == sum(getattr(one, name) for one in report.inputs)
        assert [one.file for one in report.inputs] == [str(file) for file in many_files]
        assert [one.dropped for one in report.inputs] == [{"not_ping": 60}] * 3
        assert report.examples == {"not_ping": f"{many_files[0]}:1: type is 'dns'"}
        assert report.bytes == sum(file.stat().st_size for file in many_files)

    def test_the_report_is_json(self, tmp_path: Path, many_files: list[Path]) -> None:
        report = import_atlas(many_files, tmp_path / "out", workers=1)
        loaded = json.loads(json.dumps(report.to_json()))
        assert loaded["dropped"] == {"not_ping": 180}
        assert loaded["files"] == ["measurements-00000.parquet"]
        assert loaded["inputs"][2]["results"] == 2998
        assert loaded["seconds"] > 0

    @pytest.mark.parametrize("workers", [1, 2])
    def test_progress_ends_at_the_size_of_the_input(self, tmp_path: Path, many_files: list[Path], workers: int) -> None:
        told: list[float] = []
        totals: list[float] = []

        def advance(amount: float = 1, *, total: float | None = None) -> None:
            told.append(amount)
            totals.extend([] if total is None else [total])

        report = import_atlas(many_files, tmp_path / "out", workers=workers, chunk_bytes=9999, on_progress=advance)
        assert totals == [report.bytes]
        assert sum(told) == report.bytes
        assert min(told) >= 0

    @pytest.mark.parametrize("workers", [1, 2])
    def test_strict_reports_the_first_problem_of_the_first_file(
        self, tmp_path: Path, many_files: list[Path], workers: int
    ) -> None:
        broken = tmp_path / "broken.bz2"
        broken.write_bytes(many_files[0].read_bytes()[:-30])
        with pytest.raises(PingLlmError) as error:
            import_atlas([many_files[1], broken], tmp_path / "out", workers=workers, strict=True, chunk_bytes=5000)
        assert str(error.value) == f"{many_files[1]}:1: not_ping: type is 'dns'"
        assert not (tmp_path / "out").exists()


def _double(number: int) -> int:
    return 2 * number


def _die_at_three(item: tuple[int, bytes]) -> int:
    if item[0] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return item[0]


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


POOL_SCRIPT = r"""
import os, sys, time
from ping_llm.workers import map_in_order, worker_pool

def nap(seconds):
    os.write(1, b"%d\n" % os.getpid())  # in one piece: both workers write to the same pipe
    time.sleep(seconds)

if __name__ == "__main__":
    with worker_pool(2) as pool:
        list(map_in_order(pool, nap, [60, 0], window=2))  # one worker is busy, one idle
"""


class TestWorkerPool:
    @pytest.mark.parametrize("workers", [0, 1, 2])
    def test_outcomes_come_in_order(self, workers: int) -> None:
        with worker_pool(workers) as pool:
            assert list(map_in_order(pool, _double, range(20), window=3)) == [2 * i for i in range(20)]

    def test_one_worker_is_this_process(self) -> None:
        with worker_pool(1) as pool:
            assert pool.submit(os.getpid).result() == os.getpid()

    def test_ctrl_c_is_left_to_the_parent(self) -> None:
        with worker_pool(2) as pool:
            assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_IGN

    def test_no_more_than_the_window_is_under_way(self) -> None:
        begun: list[int] = []
        with worker_pool(1) as pool:
            outcomes = map_in_order(pool, begun.append, range(100), window=4)
            next(outcomes)
            assert len(begun) == 4

    def test_a_failing_source_fails_after_the_outcomes_before_it(self) -> None:
        def items() -> Any:
            yield from range(3)
            raise PingLlmError("the file is damaged")

        with worker_pool(1) as pool:
            outcomes = map_in_order(pool, _double, items(), window=10)
            assert [next(outcomes) for _ in range(3)] == [0, 2, 4]
            with pytest.raises(PingLlmError, match="damaged"):
                next(outcomes)

    @pytest.mark.timeout(60)
    def test_a_killed_worker_is_one_line_not_a_hang(self) -> None:
        items = ((number, bytes(1 << 22)) for number in range(20))  # more than a pipe holds
        with pytest.raises(PingLlmError, match="a worker process died") as error, worker_pool(2) as pool:
            list(map_in_order(pool, _die_at_three, items, window=4))
        assert "\n" not in str(error.value)

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_workers_go_when_the_parent_goes(self, tmp_path: Path, sent: signal.Signals) -> None:
        script = tmp_path / "script.py"
        script.write_text(POOL_SCRIPT)
        with subprocess.Popen(
            [sys.executable, script],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ) as parent:
            assert parent.stdout is not None
            workers = [int(parent.stdout.readline()) for _ in range(2)]
            if sent == signal.SIGINT:
                os.killpg(parent.pid, sent)  # as a terminal does for Ctrl-C
            else:
                parent.send_signal(sent)
            assert parent.wait(timeout=20) != 0
        deadline = time.monotonic() + 20
        while any(map(_running, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(_running, workers))
