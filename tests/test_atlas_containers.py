"""Files of Atlas results: arrays and lines, compressed or not, hold the same measurements."""

import bz2
import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atlas_fixtures import as_lines, ping
from ping_llm.sources.atlas import import_atlas
from ping_llm.sources.atlas import stream as atlas_stream
from ping_llm.sources.atlas.parse import read_ping
from ping_llm.sources.atlas.stream import array_as_lines, parse_chunk, read_chunks

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
