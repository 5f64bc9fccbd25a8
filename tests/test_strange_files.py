"""Files as strangers have them, invented here in the shapes of public data and of what operators keep: read rightly, or
refused in one line that says what to do; never read wrongly without a word."""

import datetime
import decimal
import io
import json
import random
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.io import savemat  # type: ignore[import-untyped]

from format_samples import SAMPLES
from ping_llm.core.errors import PingLlmError
from ping_llm.rows.measurement_set import MeasurementSet, read_observations
from ping_llm.serve.store import read_upload
from ping_llm.sources import files
from ping_llm.sources.columns import AS_FOUND, InputOptions

CITIES = ["East US 2", "Brazil South", "West Europe", "Japan West", "Central India"]
COUNT = len(CITIES)
MS = {(a, b): 20.5 + 31.25 * abs(i - j) + 3 * i for i, a in enumerate(CITIES) for j, b in enumerate(CITIES) if a != b}


def read(path: Path, content: str | bytes, **options: Any) -> MeasurementSet:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_observations([path], options=InputOptions(**options))


def rtts(found: MeasurementSet) -> dict[tuple[str, str], list[float | None]]:
    known, each = found.observations, dict[tuple[str, str], list[float | None]]()
    for a, b, ms in zip(known.source.tolist(), known.destination.tolist(), known.rtt_ms.tolist(), strict=True):
        each.setdefault((found.nodes[a], found.nodes[b]), []).append(None if np.isnan(ms) else round(ms, 3))
    return each


def table(header: str, form: str) -> str:
    return "".join([header + "\n", *(form.format(a=a, b=b, ms=ms, s=ms / 1000) + "\n" for (a, b), ms in MS.items())])


def square(
    form: str = "{:.2f}", own: str = "", before: str = ",", header: str = "city,", after: str = "", names: str = ""
) -> str:
    rows = [
        ",".join([f"{a}{before}" + ",".join(form.format(MS[a, b]) if a != b else own for b in CITIES)]) + after
        for a in CITIES
    ]
    return "\n".join([header + ",".join(CITIES) + names, *rows, ""])


def lines(objects: Iterable[Any]) -> str:
    return "".join(json.dumps(one) + "\n" for one in objects)


def parquet(**columns: Any) -> bytes:
    content = io.BytesIO()
    pq.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), content)
    return content.getvalue()


def mat(**arrays: Any) -> bytes:
    content = io.BytesIO()
    savemat(content, arrays, do_compression=True)
    return content.getvalue()


NESTED = {a: {b: MS.get((a, b), 0.0) for b in CITIES} for a in CITIES}
GRID = np.array([list(row.values()) for row in NESTED.values()])
FROM, TO = [a for a, _ in MS], [b for _, b in MS]
LINKS = [{"source": a, "target": b, "latency": ms} for (a, b), ms in MS.items()]

READ: dict[str, str | bytes] = {
    "regions by regions": json.dumps(NESTED),
    "over many lines": json.dumps(NESTED, indent=2),
    "in a field, as text": json.dumps(
        {"metadata": {"unit": "ms"}, "data": {a: {b: f"{ms}" for b, ms in row.items()} for a, row in NESTED.items()}}
    ),
    "objects by cities": json.dumps(
        {
            "sources": [{"id": i, "name": name} for i, name in enumerate(CITIES)],
            "pingData": {
                str(i): {
                    str(j): {"source_name": a, "destination_name": b, "min": "1.0", "avg": f"{MS[a, b]}", "max": "900"}
                    for j, b in enumerate(CITIES)
                    if a != b
                }
                for i, a in enumerate(CITIES)
            },
        }
    ),
    "names beside a square": json.dumps({"regions": CITIES, "rtt": GRID.tolist()}),
    "a data frame, split": json.dumps({"columns": CITIES, "index": CITIES, "data": GRID.tolist()}),
    "a data frame by columns": json.dumps(
        {
            "src": dict(enumerate(FROM)),
            "dst": dict(enumerate(TO)),
            "rtt": dict(enumerate(MS.values())),
        }
    ),
    "lists by columns": json.dumps({"src": FROM, "dst": TO, "rtt": list(MS.values())}),
    "rows by number": json.dumps({f"row {i}": link for i, link in enumerate(LINKS)}),
    "a list in a field": json.dumps({"status": "ok", "took": 3, "measurements": LINKS}),
    "nodes beside links": json.dumps(
        {"nodes": [{"id": a, "lat": 1.5, "lon": 2.5} for a in CITIES * 9], "links": LINKS}, indent=1
    ),
    "fields of fields": lines(
        {
            "ts": 1714557600 + i,
            "source": {"host": a, "location": {"lat": 1.5, "lng": 2.5}},
            "destination": {"host": b, "geo": {"latitude": 3.5, "longitude": 4.5}},
            "stats": {"rtt": {"min": 1, "avg": ms}},
        }
        for i, ((a, b), ms) in enumerate(MS.items())
    ),
    "M-Lab, exported": lines(
        {"a": {"TestTime": "2024-05-01 10:00:00 UTC", "MinRTT": ms}, "client": {"Name": a}, "server": {"Host": b}}
        for (a, b), ms in MS.items()
    ).replace('"Name"', '"Hostname"'),
    "M-Lab, flat": table(
        "a_TestTime,a_MinRTT,a_LossRate,client_Name,client_Geo_Latitude,server_Site",
        "2024-05-01 10:00:00 UTC,{ms},0.1,{a},1.5,{b}",
    ),
    "hops beside the RTT": lines(
        {"src": a, "dst": b, "rtt": ms, "hops": [{"ip": "192.0.2.1", "rtt": 1.5}]} for (a, b), ms in MS.items()
    ),
    "coordinates in columns": table(
        "src,src_lat,src_lon,dst,dst_lat,dst_lon,distance_km,rtt_ms", "{a},1.5,2.5,{b},3.5,4.5,900,{ms}"
    ),
    "coordinates before names": table(
        "from_lat,from_lng,from_city,to_lat,to_lng,to_city,ping", "1.5,2.5,{a},3.5,4.5,{b},{ms}"
    ),
    "coordinates beside a matrix": square(before=",1.5,-2.5,", header="city,lat,lon,"),
    "coordinates behind a matrix": square(after=",1.5,-2.5", names=",latitude,longitude"),
    "countries beside a matrix": square(before=",DE,", header="city,country,"),
    "the index of a data frame beside a matrix": square()
    .replace("city,", ",city,")
    .replace("\n", "\n{}")
    .rstrip("{}")
    .format(*(f"{i}," for i in range(COUNT))),
    "blanks on the diagonal": square("{:.2f} ms", header="Source region,"),
    "mean and deviation": square("{:.2f} ± 1.3", own="-"),
    "mean and deviation in brackets": square("{:.2f} (1.3)", own="-"),
    "least, mean and largest in a cell": table("# all pairs ping", '"{a}","{b}",1.5/{ms}/900.1'),
    "German": re.sub(
        r"[.](\d+)\n", r",\1\n", table("Datum;Uhrzeit;Quelle;Ziel;Latenz (ms)", "01.05.2024;10:00:02;{a};{b};{ms}")
    ),
    "DIMES": table("SourceIP,DestIP,MinTime,AvgTime,MaxTime", "{a},{b},1.0,{ms},900"),
    "SamKnows": table(
        "unit_id,dtime,target,rtt_avg,rtt_min,rtt_max,rtt_std,successes,failures",
        "{a},2024-05-01 10:00:02,{b},{ms},1.0,900,1,50,0",
    ),
    "ctime": table("time,src,dst,rtt", "Wed May  1 10:00:02 2024,{a},{b},{ms}"),
    "RFC 2822": table("time,src,dst,rtt", '"Wed, 01 May 2024 10:00:02 GMT",{a},{b},{ms}'),
    "American, written out": table("time,src,dst,rtt", '"May 1, 2024 10:00:02 AM",{a},{b},{ms}'),
    "a struct": parquet(src=[{"name": a, "lat": 1.5} for a in FROM], dst=[{"name": b} for b in TO], rtt=[*MS.values()]),
    "decimals": parquet(src=FROM, dst=TO, rtt=[decimal.Decimal(str(ms)) for ms in MS.values()]),
    "durations": parquet(src=FROM, dst=TO, rtt=[datetime.timedelta(milliseconds=ms) for ms in MS.values()]),
    "a matrix in Parquet": parquet(city=CITIES, **{b: GRID[:, j] for j, b in enumerate(CITIES)}),
    "MATLAB": mat(rtt=GRID, names=np.array([[name] for name in CITIES], dtype=object)),
}


@pytest.mark.parametrize("name", READ)
def test_what_strangers_have_is_read_rightly(name: str, tmp_path: Path) -> None:
    assert rtts(read(tmp_path / "file", READ[name])) == {pair: [ms] for pair, ms in MS.items()}


def test_london_is_no_longitude(tmp_path: Path) -> None:
    for content in (
        "probe,lon,nyc\na,5.5,7.5\nb,6.5,8.5\n",
        "probe,lat,lon,nyc,x\na,1.5,2.5,5.5,7.5\nb,1.5,2.5,6.5,8.5\n",
    ):
        found = rtts(read(tmp_path / "file", content))
        assert [*found.values()] == [[5.5], [7.5], [6.5], [8.5]]
    square = "city,lat,lon\nlat,0,5.5\nlon,6.5,0\n"
    assert rtts(read(tmp_path / "file", square)) == {("lat", "lon"): [5.5], ("lon", "lat"): [6.5]}


def test_empty_columns_and_rows_beside_a_matrix_are_nothing(tmp_path: Path) -> None:
    content = re.sub(r"(?m)$", ",,", square().rstrip("\n")) + "\n" + "," * (COUNT + 2) + "\n"
    assert rtts(read(tmp_path / "file", content)) == {pair: [ms] for pair, ms in MS.items()}


def test_times_that_are_written_out_are_understood(tmp_path: Path) -> None:
    for name, hour in {"ctime": 10, "RFC 2822": 10, "American, written out": 22}.items():
        found = read(tmp_path / "file", str(READ[name]).replace("AM", "PM"))
        assert {*found.observations.time_s.tolist()} == {1714521602.0 + hour * 3600}, name


EACH: dict[str, str | bytes] = {
    "JSON": lines({"src": a, "dst": b, "rtts": [ms, ms + 1, None]} for (a, b), ms in MS.items()),
    "JSON of samples": lines(
        {"src": a, "dst": b, "samples": [{"rtt": ms}, {"rtt": ms + 1}, {"rtt": None}]} for (a, b), ms in MS.items()
    ),
    "Parquet": parquet(src=FROM, dst=TO, rtt=[[ms, ms + 1, None] for ms in MS.values()]),
}


@pytest.mark.parametrize("name", EACH)
def test_a_list_of_rtts_is_a_measurement_each(name: str, tmp_path: Path) -> None:
    assert rtts(read(tmp_path / "file", EACH[name])) == {pair: [ms, ms + 1, None] for pair, ms in MS.items()}


def test_nines_are_a_timeout_only_where_they_would_be_ten_seconds(tmp_path: Path) -> None:
    (pair, _), *rest = MS.items()
    for unit, scale, cell, expected in (
        ("ms", 1, "9999", None),
        ("ms", 1, "99999.0", None),
        ("ms", 1, "9998", 9998.0),
        ("us", 1000, "9999", 9.999),
        ("us", 1000, "9999999", None),
    ):
        body = "".join(f"{a},{b},{ms * scale}\n" for (a, b), ms in rest)
        found = read(tmp_path / "file", f"src,dst,rtt_{unit}\n{pair[0]},{pair[1]},{cell}\n{body}")
        assert rtts(found) == {pair: [expected], **{pair: [ms] for pair, ms in rest}}


def result(a: int, b: int) -> dict[str, Any]:
    ends = {"from": f"192.0.2.{a}", "dst_addr": f"198.51.100.{b}", "af": 4, "prb_id": a, "msm_id": 1}
    return {**ends, "type": "ping", "timestamp": 1714557600 + a, "result": [{"rtt": 10.5 + b}], "sent": 1, "rcvd": 1}


def test_pages_of_atlas_results_are_their_results(tmp_path: Path) -> None:
    pages = [{"count": 4, "next": None, "results": [result(a, b) for b in (1, 2)]} for a in (1, 2)]
    expected = {(f"192.0.2.{a}", f"198.51.100.{b}"): [10.5 + b] for a in (1, 2) for b in (1, 2)}
    assert rtts(read(tmp_path / "pages", lines(pages))) == expected
    assert rtts(read(tmp_path / "pretty", "\n".join(json.dumps(page, indent=2) for page in pages))) == expected


def archive(kind: str) -> bytes:
    content = io.BytesIO()
    if kind == "tar":
        with tarfile.open(fileobj=content, mode="w:gz") as tar:
            tar.addfile(tarfile.TarInfo("pings.csv"), io.BytesIO())
    else:
        with zipfile.ZipFile(content, "w") as packed:
            packed.writestr("[Content_Types].xml" if kind == "xlsx" else "pings.csv", "x")
    return content.getvalue()


HDF = b"\x89HDF\r\n\x1a\n"
REFUSED: dict[str, tuple[str | bytes, str]] = {
    "xlsx": (archive("xlsx"), "is a spreadsheet: save the table as CSV"),
    "xls": (b"\xd0\xcf\x11\xe0" + b"\0" * 99, "is an old spreadsheet: save the table as CSV"),
    "zip": (archive("zip"), "is an archive: unpack it"),
    "tar.gz": (archive("tar"), "is an archive: unpack it"),
    "MATLAB 7.3": (b"MATLAB 7.3 MAT-file".ljust(512) + HDF, "MATLAB 7.3: save the table as CSV or .npy"),
    "HDF5": (HDF + b"\0" * 99, "HDF5, .*: save the table as CSV or .npy"),
    "NetCDF": (b"CDF\x01" + b"\0" * 99, "NetCDF .*: save the table as CSV or .npy"),
    "R": (b"X\n\0\0\0\3\0\4\2\1", "R data: save the table with write.csv"),
    "pickle": (b"\x80\x04\x95" + b"\0" * 99, "a Python pickle: save the table with to_csv or to_parquet"),
    "SQLite": (b"SQLite format 3\0", "an SQLite database: export the table"),
    "Arrow": (b"ARROW1\0\0", "save the table as Parquet or CSV"),
    "packets": (b"\xd4\xc3\xb2\xa1" + b"\0" * 99, "a packet capture"),
    "warts": (b"\x12\x05\0\x01", "give the output of sc_warts2json"),
    "PDF": (b"%PDF-1.4\n", "a PDF"),
    "web page": ("<!DOCTYPE html>\n<html></html>\n", "a web page: save its table as CSV"),
    "mtr --xml": ('<?xml version="1.0"?>\n<MTR SRC="a" DST="b">\n</MTR>\n', "XML: .*mtr: --json"),
    "traceroute": (
        "traceroute to 192.0.2.1 (192.0.2.1), 30 hops max\n 1  192.0.2.9  0.3 ms\n",
        "traceroute, .*use ping",
    ),
    "nping": ("\nStarting Nping 0.7.80\nSENT (0.04s) ICMP\n", "output of nping: use ping or fping"),
    "iperf": ("-" * 30 + "\nClient connecting to 192.0.2.1, TCP port 5001\n", "output of iperf: use ping"),
    "lists": ("[[0, 5.5], [5.5, 0]]", "JSON of lists without names"),
    "days since 1900": (
        table("time,src,dst,rtt", "45413.5,{a},{b},{ms}"),
        "look like days since 1900, as spreadsheets",
    ),
    "nodes": ("name,latitude,longitude\na,1.5,2.5\n", "no column 'src_addr'.*or give a table of nodes as --nodes"),
    "only hops": (
        lines({"src": a, "dst": b, "hops": [{"addr": "192.0.2.1", "rtt": 1.5}]} for a, b in MS),
        "no column 'rtt' or of another usual name .it has: src, dst.",
    ),
    "one who pings": (
        "target,avg_ms\na,5.5\n",
        "name yours with --columns src_addr=NAME, or add one that says who pings",
    ),
    "RTTs 1 to 3": (table("src,dst,rtt1,rtt2", "{a},{b},{ms},{ms}"), "no column 'rtt'"),
    "half of a pair": ("a,b,rtt\nx,y,10/5\nx,y,7/3\n", "2 bad_rtt"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line_that_says_what_to_do(name: str, tmp_path: Path) -> None:
    content, says = REFUSED[name]
    with pytest.raises(PingLlmError, match=says) as refused:
        read(tmp_path / "file", content)
    assert "\n" not in str(refused.value)


def test_days_since_1900_are_seconds_if_one_insists(tmp_path: Path) -> None:
    found = read(tmp_path / "file", REFUSED["days since 1900"][0], allow_bad_rows=True)
    assert {*found.observations.time_s.tolist()} == {45413.5}


@pytest.mark.parametrize(
    "content",
    [
        '{"a":[{"src":{},"dst":{},"rtt":{}}]}',
        '{"a":' * 900 + "1" + "}" * 900,
        '{"a":[{"b":1},' * 400 + "{}" + "]}" * 400,
        '{"a":[' * 40 + "{}" + "]}" * 40,
    ],
)
def test_json_of_any_depth_is_refused_at_once(content: str, tmp_path: Path) -> None:
    with pytest.raises(PingLlmError, match=r"no column '\w+_addr'|holds no JSON object"):
        read(tmp_path / "file", content)


def test_json_of_any_shape_is_read_or_refused_in_one_line(tmp_path: Path) -> None:
    rng = random.Random(5)
    names = ["src", "dst", "rtt", "a", "b", "index", "columns", "data", "avg", "hops", "", "x.y"]

    def value(depth: int) -> Any:
        kind = rng.randrange(3) if depth else 0
        if kind == 0:
            return rng.choice([1, 5.5, None, "a", "12.5", True, -1, "", []])
        if kind == 1:
            return {rng.choice(names): value(depth - 1) for _ in range(rng.randrange(5))}
        return [value(depth - 1)] * rng.randrange(4) or [value(depth - 1) for _ in range(rng.randrange(5))]

    refusals = []
    for _ in range(150):
        content = "\n".join(json.dumps({rng.choice(names): value(4)}, indent=rng.choice([None, 1])) for _ in range(2))
        try:
            read(tmp_path / "file", content)
        except PingLlmError as refused:
            refusals.append(str(refused))
    assert refusals
    assert "\n" not in "".join(refusals)


def test_a_matrix_of_more_cells_than_a_server_takes_is_refused(tmp_path: Path) -> None:
    content = json.dumps({str(a): {str(b): 1.5 for b in range(200)} for a in range(200)}).encode()
    with pytest.raises(PingLlmError, match="measurements are more than the 100 that this server takes at once"):
        read_upload(content, 100)
    with pytest.raises(PingLlmError, match="the file is an array: upload the matrix as a text table instead"):
        read_upload(mat(rtt=GRID), 100)


WINDOWS = {
    "French": (
        "Envoi d'une requête 'Ping'  {} avec 32 octets de données :",
        "Réponse de {} : octets=32 temps=14 ms TTL=55",
        "Délai d'attente de la demande dépassé.",
        "    Paquets : envoyés = 3, reçus = 2, perdus = 1 (perte 33%),",
    ),
    "Japanese": (
        "{} に ping を送信しています 32 バイトのデータ:",
        "{} からの応答: バイト数 =32 時間 =14ms TTL=55",
        "要求がタイムアウトしました。",
        "    パケット数: 送信 = 3、受信 = 2、損失 = 1 (33% の損失)、",
    ),
    "Russian": (
        "Обмен пакетами с {} по с 32 байтами данных:",
        "Ответ от {}: число байт=32 время=14мс TTL=55",
        "Превышен интервал ожидания для запроса.",
        "    Пакетов: отправлено = 3, получено = 2, потеряно = 1",
    ),
    "Chinese": (
        "正在 Ping {} 具有 32 字节的数据:",
        "来自 {} 的回复: 字节=32 时间=14ms TTL=55",
        "请求超时。",
        "    数据包: 已发送 = 3，已接收 = 2，丢失 = 1 (33% 丢失)，",
    ),
}


@pytest.mark.parametrize(("language", "encoding"), [*((name, "utf-8") for name in WINDOWS), ("Japanese", "cp932")])
@pytest.mark.parametrize("address", ["198.51.100.1", "2001:db8::1"])
def test_ping_of_windows_is_read_in_any_language(language: str, encoding: str, address: str, tmp_path: Path) -> None:
    begin, answer, timeout, total = WINDOWS[language]
    content = "\r\n".join(["", begin, answer, timeout, answer, "", total, ""]).replace("{}", address)
    found = read(tmp_path / "desk.txt", content.encode(encoding))
    assert rtts(found) == {("desk", address): [14.0, None, 14.0]}


def test_hping_is_read_as_ping(tmp_path: Path) -> None:
    answer = "len=46 ip=198.51.100.1 ttl=55 DF id=0 sport=80 flags=SA seq={} win=29200 rtt={}.5 ms\n"
    content = "HPING 198.51.100.1 (eth0 198.51.100.1): S set, 40 headers + 0 data bytes\n"
    content += answer.format(0, 14) + answer.format(2, 16) + "\n--- 198.51.100.1 hping statistic ---\n"
    content += "3 packets transmitted, 2 packets received, 34% packet loss\n"
    assert rtts(read(tmp_path / "ping.txt", content)) == {("localhost", "198.51.100.1"): [14.5, 16.5, None]}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_the_output_of_each_tool_is_known_as_such_among_all_files(name: str, encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(SAMPLES[name].text.encode(encoding))
    file, _ = files.describe(path, AS_FOUND, 1 << 20)
    assert file.format == "tool"


def test_a_table_is_read_without_the_readers_of_tools(tmp_path: Path) -> None:
    path = tmp_path / "pings.csv"
    path.write_text(table("src,dst,rtt (ms)", "{a},{b},{ms}"))
    program = (
        "import sys; from ping_llm.rows.measurement_set import read_observations;"
        f"read_observations([{str(path)!r}]); print(*(m for m in sys.modules if m.startswith('ping_llm.sources')))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "ping_llm.sources.tables" in loaded
    assert not {f"ping_llm.sources.{name}" for name in ("tools", "ping_tools", "monitoring", "objects")} & {*loaded}
