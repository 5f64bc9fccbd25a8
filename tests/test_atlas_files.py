"""Files of Atlas results: arrays and lines, compressed or not, hold the same measurements; others are refused."""

import bz2
import gzip
import json
import lzma
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_fixtures import as_lines, ping, visible
from ping_llm.core.errors import PingLlmError
from ping_llm.sources.atlas import import_atlas
from ping_llm.sources.atlas_results import parse_chunk, read_ping
from ping_llm.sources.objects import ReadSizes, array_as_lines, read_chunks

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
    "xz": lzma.compress,
    "zstd": lambda data: pa.compress(data, codec="zstd", asbytes=True),
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
    @settings(max_examples=100, deadline=None)
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
        chunks = list(read_chunks(file, ReadSizes(chunk=chunk_bytes, block=block_bytes + 3)))
        parsed = [parse_chunk(chunk, each_packet=each_packet) for chunk in chunks]
        expected = [read_ping(result, each_packet=each_packet) for result in results]

        table = pa.Table.from_batches([chunk.batch for chunk in parsed])
        assert [chunk.counts.dropped for chunk in parsed if chunk.counts.dropped] == []
        assert sum(chunk.counts.results for chunk in parsed) == len(results)
        assert table.column("src_addr").to_pylist() == [p.source for p in expected for _ in p.rtts]
        assert table.column("dst_addr").to_pylist() == [p.destination for p in expected for _ in p.rtts]
        assert table.column("ip_version").to_pylist() == [p.ip_version for p in expected for _ in p.rtts]
        assert table.column("event_time").cast(pa.int64()).to_pylist() == [
            p.time_us + packet for p in expected for packet in range(len(p.rtts))
        ]
        assert table.column("prb_id").to_pylist() == [p.probe for p in expected for _ in p.rtts]
        assert table.column("rtt").equals(pa.chunked_array([pa.array(p.rtts, pa.float32()) for p in expected]))

    @settings(max_examples=200, deadline=None)
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
            (gzip.compress(b"\n", mtime=0), "the file is empty"),
            (b"<html><body>502</body></html>", "is a web page"),
            (b"time,src,dst,rtt\n1,2,3,4\n", "not RIPE Atlas JSON"),
            (b"{{ template }}\n{ body }\n", "not RIPE Atlas JSON.* none of 2 is valid JSON"),
            (b"\xfd7zXZ\x00abc", r"compressed data is (cut off|damaged)"),
            (b"\x28\xb5\x2f\xfdabc", r"compressed data is (cut off|damaged)"),
            (lzma.compress(as_lines([ping()]) * 99)[:-9], r"compressed data is cut off \(read \d+ of \d+ bytes\)"),
            (b"PK\x03\x04abc", "is an archive"),
            (b"PAR1abc", "not RIPE Atlas JSON: it starts with b'PAR1abc'"),
            (bz2.compress(as_lines([ping()]) * 99)[:-9], r"compressed data is cut off \(read \d+ of \d+ bytes\)"),
            (
                gzip.compress(as_lines([ping()]) * 99, mtime=0)[:-9],
                r"compressed data is cut off \(read \d+ of \d+ bytes\)",
            ),
            (bz2.compress(as_lines([ping()])) + b"garbage", "compressed data is damaged"),
            (gzip.compress(as_lines([ping()]), mtime=0) + b"garbage", "compressed data is damaged"),
            (bz2.compress(as_lines([ping()])).replace(b"1AY&SY", b"1AY&SX"), "compressed data is damaged"),
            (gzip.compress(as_lines([ping()]), mtime=0)[:-8] + b"\0" * 8, "compressed data is damaged"),
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

    def test_a_line_without_end_is_refused_before_it_fills_the_memory(self, tmp_path: Path) -> None:
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping()]) + b'{"a": "' + b"x" * (3 << 20))
        with pytest.raises(PingLlmError, match="line 2 is over 1,048,576 bytes"):
            import_atlas([file], tmp_path / "out", sizes=ReadSizes(chunk=1 << 16, block=1 << 16, result=1 << 20))

    def test_bad_options_are_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "in.json"
        file.write_bytes(as_lines([ping()]))
        bad: list[dict[str, Any]] = [{"packets": "max"}, {"workers": 0}, {"rows_per_file": 0}]
        for options in bad:
            with pytest.raises(PingLlmError, match="must be"):
                import_atlas([file], tmp_path / "out", **options)
