"""Measurements in the forms in which others have published them: read as they are, or refused with what settles it."""

import gzip
import io
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from ping_llm.core.errors import PingLlmError
from ping_llm.rows.measurement_set import MeasurementSet, read_observations
from ping_llm.serve.store import read_upload
from ping_llm.sources.columns import InputOptions

COUNT = 12
MS: npt.NDArray[np.float64] = 20 + 7.25 * np.abs(np.subtract.outer(np.arange(COUNT), np.arange(COUNT))).astype(float)
PAIRS = [(i, j) for i in range(COUNT) for j in range(COUNT) if i != j]
HOSTS = [f"planetlab{i}.example.edu" for i in range(COUNT)]
EXPECTED = {(i, j): MS[i, j] for i, j in PAIRS}


def read(path: Path, content: str | bytes, **options: Any) -> MeasurementSet:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_observations([path], options=InputOptions(**options))


def measured(found: MeasurementSet, names: list[str]) -> dict[tuple[int, int], float]:
    """RTTs of pairs, with the nodes numbered from 0."""
    number = {name: i for i, name in enumerate(names)}
    known = found.observations
    ends = ([number[found.nodes[node]] for node in end.tolist()] for end in (known.source, known.destination))
    return dict(zip(zip(*ends, strict=True), known.rtt_ms.tolist(), strict=True))


def understood(found: MeasurementSet) -> str:
    assert found.reading is not None
    return found.reading.lines[0]


def numbered(first: int) -> list[str]:
    return [str(i + first) for i in range(COUNT)]


def lines(form: str, **columns: Any) -> str:
    """A line for each pair. `at` counts minutes."""
    return "".join(
        form.format(i=i, j=j, ms=MS[i, j], us=MS[i, j] * 1000, s=MS[i, j] / 1000, src=HOSTS[i], dst=HOSTS[j], at=at)
        for at, (i, j) in enumerate(PAIRS)
    )


def square(separator: str, scale: float = 1.0, missing: str = "-1", form: str = "{:g}") -> str:
    """Without names; the pair (1, 2) was not measured."""
    cells = [[form.format(MS[i, j] * scale) if i != j else "0" for j in range(COUNT)] for i in range(COUNT)]
    cells[1][2] = missing
    return "".join(separator.join(row) + "\n" for row in cells)


LONG = {
    "King: i j µs": ("{i} {j} {us:.0f}\n", {"rtt_unit": "us"}, numbered(0)),
    "p2psim, tabs": ("{i}\t{j}\t{ms:.2f}\n", {}, numbered(0)),
    "iPlane: PoP numbers": ("{i}, {j}, {ms:.4f}\n", {}, numbered(0)),
    "Harvard: seconds since the beginning, ids, ms": ("{at}.125\t{i}\t{j}\t{ms:.3f}\n", {}, numbered(0)),
    "Harvard in seconds": ("{at}.125 {i} {j} {s:.6f}\n", {"rtt_unit": "s"}, numbered(0)),
    "Seattle: epoch seconds, ids, ms": ("14000{at:05} {i} {j} {ms:.3f}\n", {}, numbered(0)),
    "ISO 8601, ids, ms": ("2024-05-01T10:{at:02.0f}:00Z,{i},{j},{ms}\n", {}, numbered(0)),
    "all-pairs-ping: min avg max": ("{src} {dst} 1.5 {ms:.3f} 900.25\n", {}, HOSTS),
    "a comma between thousands": ('{src},{dst},"{us:,.0f}"\n', {"rtt_unit": "us"}, HOSTS),
    "exponents": ("{i} {j} {ms:.8e}\n", {}, numbered(0)),
}


@pytest.mark.parametrize("name", LONG)
def test_lines_of_numbers_without_a_header_are_pairs_and_rtts(name: str, tmp_path: Path) -> None:
    form, options, names = LONG[name]
    content = lines(form) if "ISO" not in name else lines(form.replace("{at:02.0f}", "{at:02}"))[: 50 * 30]
    found = read(tmp_path / "pings", content.rpartition("\n")[0], **options)
    pairs = measured(found, names)
    assert pairs == pytest.approx({pair: EXPECTED[pair] for pair in pairs})
    assert len(pairs) >= 40
    assert "no header: columns by number" in understood(found)


def test_the_times_of_a_trace_may_count_from_its_beginning(tmp_path: Path) -> None:
    found = read(tmp_path / "trace", lines("{at}.5 {i} {j} {ms}\n"))
    assert found.observations.time_s.tolist() == [at + 0.5 for at in range(len(PAIRS))]


MATRICES = {
    "King": (square(" "), {}),
    "King in µs": (square(" ", 1000, form="{:.0f}"), {"rtt_unit": "us"}),
    "Meridian in µs, 0 for missing": (square("\t", 1000, missing="0", form="{:.0f}"), {"rtt_unit": "us"}),
    "nan for missing": (square(",", missing="nan"), {}),
    "nothing for missing": (square(",", missing=""), {}),
    "after the number of nodes": (f"{COUNT}\n" + square(" "), {}),
    "after a comment and a title": ("# 2024\nRTTs\n" + square(","), {}),
    "as numpy.savetxt writes it": (square(" ", form="{:.18e}"), {}),
}


@pytest.mark.parametrize("name", MATRICES)
def test_a_square_of_numbers_is_a_matrix_of_nodes_by_number(name: str, tmp_path: Path) -> None:
    content, options = MATRICES[name]
    found = read(tmp_path / "matrix", content, **options)
    assert measured(found, numbered(1)) == pytest.approx({p: ms for p, ms in EXPECTED.items() if p != (1, 2)})
    assert "a matrix: nodes by number, RTT" in understood(found)


def test_a_matrix_may_have_numbers_as_names(tmp_path: Path) -> None:
    rows = [["", *numbered(0)], *([str(i), *map(str, row)] for i, row in enumerate(MS))]
    found = read(tmp_path / "matrix.csv", "\n".join(map(",".join, rows)))
    assert measured(found, numbered(0)) == pytest.approx(EXPECTED)


def test_numpy_arrays_are_matrices_or_lines(tmp_path: Path) -> None:
    missing = MS * (1 - np.eye(COUNT))
    missing[1, 2] = np.nan
    one, named, triples = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(one, missing)
    np.savez(named, rtt=missing, names=np.array(HOSTS))
    np.save(triples, np.array([[i, j, MS[i, j]] for i, j in PAIRS]))
    expected = {p: ms for p, ms in EXPECTED.items() if p != (1, 2)}
    assert measured(read(tmp_path / "m.npy", one.getvalue()), numbered(1)) == pytest.approx(expected)
    assert measured(read(tmp_path / "m.npz", named.getvalue()), HOSTS) == pytest.approx(expected)
    assert measured(read(tmp_path / "t.npy", triples.getvalue()), numbered(0)) == pytest.approx(EXPECTED)
    with pytest.raises(PingLlmError, match="upload the matrix as a text table"):
        read_upload(one.getvalue(), 1000)


def test_an_archive_of_several_arrays_says_what_to_do(tmp_path: Path) -> None:
    several, objects = io.BytesIO(), io.BytesIO()
    np.savez(several, a=MS, b=MS)
    np.save(objects, np.array([{}]), allow_pickle=True)
    with pytest.raises(PingLlmError, match="has 2 arrays of numbers in two dimensions, not one: save it alone"):
        read(tmp_path / "m.npz", several.getvalue())
    with pytest.raises(PingLlmError, match=r"cannot read .*: Object arrays cannot be loaded"):
        read(tmp_path / "m.npy", objects.getvalue())


HEADERS = {
    "WonderNetwork": ("source,destination,timestamp,min,avg,max,mdev", '"{i}","{j}","2020-07-19",1,"{ms}",900,1'),
    "GCP": ("sending_region,receiving_region,milliseconds", "{i},{j},{ms}"),
    "regions": ("Source Region;Target Region;Median Latency (ms);Loss %", "{i};{j};{ms};0"),
    "M-Lab": ("date,a.TestTime,a.MinRTT,a.LossRate,client.IP,server.IP", "2024-05-01,1714557600,{ms},0.1,{i},{j}"),
    "NDT": ("TestTime,ClientIP,ServerIP,MinRTT", "2024-05-01T10:00:00Z,{i},{j},{ms}"),
    "Ark": ("#timestamp|monitor|target|rtt", "1714557600|{i}|{j}|{ms}"),
    "RIPE Atlas as CSV": ("msm_id,prb_id,timestamp,dst_name,min,avg,max", "1001,{i},1714557600,{j},1,{ms},900"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_columns_are_found_by_the_names_that_others_give_them(name: str, tmp_path: Path) -> None:
    header, form = HEADERS[name]
    found = read(tmp_path / "pings.csv", f"{header}\n" + lines(form + "\n"))
    assert measured(found, numbered(0)) == pytest.approx(EXPECTED)


def test_an_exact_time_is_better_than_a_date(tmp_path: Path) -> None:
    found = read(tmp_path / "p", "date,start_time,src,dst,rtt\n2024-05-01,2024-05-01 10:00:00,a,b,7\n")
    assert found.observations.time_s.tolist() == [1714557600.0]


TABLE = "Time;Source;Destination;Latency (µs)\r\n" + lines("01.05.2024 10:00;{src};{dst};{us:.0f}\r\n")
TEXTS = {
    "with a byte order mark": TABLE.encode("utf-8-sig"),
    "UTF-16": TABLE.encode("utf-16"),
    "Windows-1252": TABLE.encode("cp1252"),
    "gzip": gzip.compress(TABLE.encode()),
    "xz": lzma.compress(TABLE.encode()),
    "zstd": pa.compress(TABLE.encode(), codec="zstd", asbytes=True),
    "ends of lines of old": TABLE.replace("\r\n", "\r").encode(),
    "comments": TABLE.replace("\r\n01", "\r\n# later\r\n01").encode(),
    "thousands": ("Time;Source;Destination;Latency (µs)\n" + lines('01.05.2024;{src};{dst};"{us:,.0f}"\n')).encode(),
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_spreadsheets_and_archives_do_to_a_table_changes_nothing(name: str, tmp_path: Path) -> None:
    found = read(tmp_path / "export.dat", TEXTS[name])
    assert measured(found, HOSTS) == pytest.approx(EXPECTED)
    assert found.dropped == {}


def test_a_damaged_xz_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(PingLlmError, match=r"cannot read .*pings: "):
        read(tmp_path / "pings", lzma.compress(TABLE.encode())[:-20])


def test_a_comma_that_may_be_either_needs_to_be_said(tmp_path: Path) -> None:
    table = "src;dst;rtt\na;b;1,250\nb;a;2,125\n"
    with pytest.raises(PingLlmError, match=r"RTTs like 1,250 may have a comma .*: write --decimal comma or point"):
        read(tmp_path / "pings", table)
    for decimal, rtts in {"comma": [1.25, 2.125], "point": [1250, 2125]}.items():
        assert read(tmp_path / "pings", table, decimal=decimal).observations.rtt_ms.tolist() == rtts
    with pytest.raises(PingLlmError, match="write comma or point"):
        InputOptions(decimal=",")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lines("{i} {j} {us:.0f}\n"), "the median RTT would be 49,000 ms, and no unit is given: say --rtt-unit us"),
        (lines("{i} {j} {at} {ms:.0f} 64\n"), "the cells do not tell which column is src_addr and dst_addr"),
        (lines("{at} 64 {ms}\n"), "the cells do not tell which column is src_addr and dst_addr"),
        (lines("{src} {dst} {ms} {at}.5\n"), "the cells do not tell which column is rtt"),
        (b"\0" * 99, "unknown kind of file .known: Parquet, CSV"),
    ],
    ids=range(5),
)
def test_what_may_mean_two_things_is_refused_with_what_settles_it(
    content: str | bytes, says: str, tmp_path: Path
) -> None:
    with pytest.raises(PingLlmError, match=says):
        read(tmp_path / "pings", content)


def test_a_nodes_file_of_other_nodes_is_named(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("name,address\nlon,192.0.2.1\n")
    found = read(tmp_path / "pings", lines("{src} {dst} {ms}\n"), nodes=str(tmp_path / "nodes.csv"))
    assert understood(found).endswith("nodes.csv has none of the nodes")


WIDE = [["", *HOSTS], *([str(i), *map(str, row)] for i, row in enumerate(MS))]


@pytest.mark.parametrize("first", ["{}", "17145{:05}", "2024-05-01 10:00:{:02}", "10:{:02}"])
def test_rows_by_time_or_by_number_are_no_matrix_of_nodes(first: str, tmp_path: Path) -> None:
    content = "".join(",".join([first.format(int(row[0])) if row[0] else "", *row[1:]]) + "\n" for row in WIDE)
    with pytest.raises(PingLlmError, match="no column 'src_addr'"):
        read(tmp_path / "wide.csv", content)


def test_means_beside_a_matrix_are_not_those_of_a_node(tmp_path: Path) -> None:
    rows = [["", *HOSTS, "Average"], *([HOSTS[i], *map(str, row), "33"] for i, row in enumerate(MS))]
    rows.append(["Average", *["33"] * (COUNT + 1)])
    assert measured(read(tmp_path / "m", "\n".join(map(",".join, rows))), HOSTS) == pytest.approx(EXPECTED)


def test_a_column_that_is_named_as_the_rtt_is_not_the_time_as_well(tmp_path: Path) -> None:
    found = read(tmp_path / "p", "src,dst,Time\na,b,7.5\nb,a,8.5\n", columns={"rtt": "time"})
    assert found.observations.rtt_ms.tolist() == [7.5, 8.5]
    assert np.isnan(found.observations.time_s).all()


def test_what_ping_says_of_a_timeout_is_one(tmp_path: Path) -> None:
    found = read(tmp_path / "p", "src,dst,rtt\na,b,Request timed out.\nb,a,8.5\n")
    assert found.reading is not None
    assert (found.reading.timeouts, found.dropped) == (1, {})
