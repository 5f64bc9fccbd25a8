"""What ping tools write: every reader on real samples, on damaged ones, and through the commands."""

import bz2
import gzip
import json
import random
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
import pytest

from format_samples import FPING_TIMES, HERE, PING_D, SAMPLES, SMOKEPING, V6, A, B, Measured, Sample, smokeping_database
from ping_llm.core.errors import PingLlmError
from ping_llm.rows.measurement_set import read_observations
from ping_llm.serve.store import read_upload
from ping_llm.sources import files
from ping_llm.sources.columns import AS_FOUND, InputOptions
from ping_llm.sources.contents import BLOCK_BYTES
from ping_llm.sources.files import Piece
from ping_llm.sources.tools import READERS, TABLE, read_tool, tool_of, vantage_in


def written(sample: Sample, folder: Path, content: bytes | None = None) -> Path:
    path = folder / sample.file
    path.write_bytes(sample.text.encode() if content is None else content)
    return path


def read_table(path: Path, labels: Mapping[str, str] = MappingProxyType({})) -> pa.Table:
    piece = Piece(path=str(path), format="tool", columns=dict(labels), bytes=0)
    return pa.Table.from_batches((raw.batch for raw in read_tool(piece, 1 << 20, strict=False)), schema=TABLE)


def measured(table: pa.Table) -> list[Measured]:
    times = [None if at is None else at.timestamp() for at in table["event_time"].to_pylist()]
    return list(zip(times, *(table[name].to_pylist() for name in TABLE.names[1:]), strict=True))


def rounded(rows: Sequence[Measured]) -> list[Measured]:
    return [(at and round(at, 6), src, dst, rtt and round(rtt, 6)) for at, src, dst, rtt in rows]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_reader_finds_every_measurement_of_a_sample(name: str, tmp_path: Path) -> None:
    sample = SAMPLES[name]
    table = read_table(written(sample, tmp_path))
    assert table.schema == TABLE
    assert rounded(measured(table)) == rounded(sample.measured)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_content_tells_the_format_whatever_the_file_is_called(name: str) -> None:
    sample = SAMPLES[name]
    assert [reader for reader in READERS if tool_of(sample.text[:BLOCK_BYTES]) == reader] == [sample.reader]


def test_every_reader_has_a_sample() -> None:
    assert {sample.reader for sample in SAMPLES.values()} == set(READERS)


@pytest.mark.parametrize(
    "text",
    [
        "event_time,src_addr,dst_addr,rtt\n2024-05-01 12:00:00,192.0.2.1,198.51.100.1,12.5\n",
        "time;source;destination;rtt_ms\n1714557600;192.0.2.1;198.51.100.1;7,1 ms\n",
        '{"fw":5020,"msm_id":1,"prb_id":2,"from":"192.0.2.1","dst_addr":"198.51.100.1","type":"ping","result":[]}\n',
        '[{"event_time": 1714557600, "src_addr": "192.0.2.1", "dst_addr": "198.51.100.1", "rtt": 3}]\n',
        "Some notes about ping: it took 12 ms.\n",
        "",
    ],
)
def test_other_files_are_left_to_other_readers(text: str) -> None:
    assert tool_of(text) is None


def test_compressed_and_utf16_text_is_read_the_same(tmp_path: Path) -> None:
    plain = SAMPLES["ping_windows"].text
    contents = {
        "desk.txt.gz": gzip.compress(plain.encode()),
        "desk.txt.bz2": bz2.compress(plain.encode()),
        "desk.out": plain.replace("\n", "\r\n").encode("utf-16"),  # as PowerShell's > writes it
        "desk.log": plain.encode("cp1252"),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        assert read_table(tmp_path / name)["rtt"].to_pylist() == [11.0, 0.5, None, None], name


@pytest.mark.skipif(shutil.which("rrdtool") is None, reason="rrdtool is not installed")
def test_a_round_robin_database_is_read_through_rrdtool(tmp_path: Path) -> None:
    path = smokeping_database(tmp_path)
    assert rounded(measured(read_table(path))) == rounded(SMOKEPING)
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(PingLlmError, match=r"rrdtool cannot read .*\.rrd: "):
        read_table(path)


def test_without_rrdtool_a_database_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "target.rrd"
    path.write_bytes(b"RRD\x000003\x00")
    with pytest.raises(PingLlmError, match="install rrdtool, or give the output of rrdtool dump"):
        read_table(path)


@pytest.mark.parametrize(
    ("name", "vantage"),
    [
        ("ping", "localhost"),
        ("fping_192.0.2.10-2024-05-01", "192.0.2.10"),
        ("2001:db8::5", "2001:db8::5"),
        ("ping-ams1.example.net", "ams1.example.net"),
        ("results_20240501T1200", "localhost"),
        ("ams_fra", "ams-fra"),
    ],
)
def test_the_vantage_point_is_the_host_in_the_name_of_the_file(name: str, vantage: str) -> None:
    assert vantage_in(name) == vantage


def test_a_file_that_is_called_after_its_target_does_not_say_who_pings(tmp_path: Path) -> None:
    for name, sample in {"example.com.txt": "ping_linux", f"{A}.txt": "fping_each"}.items():
        (tmp_path / name).write_text(SAMPLES[sample].text)
        rows = read_table(tmp_path / name).to_pylist()
        assert {row["src_addr"] for row in rows if row["dst_addr"] == A} == {"localhost"}


def test_the_user_names_the_unit_of_an_expression(tmp_path: Path) -> None:
    options = InputOptions(rtt_unit="ms")
    known = read_observations([written(SAMPLES["prometheus_vector"], tmp_path)], options=options)
    assert known.observations.rtt_ms.tolist() == pytest.approx([0.015])


def test_the_user_names_the_vantage_point_or_the_label_that_holds_it(tmp_path: Path) -> None:
    fping = read_table(written(SAMPLES["fping_each"], tmp_path), {"src_addr": "fra2"})
    assert set(fping["src_addr"].to_pylist()) == {"fra2"}
    answer = read_table(written(SAMPLES["prometheus_blackbox"], tmp_path), {"src_addr": "job"})
    assert set(answer["src_addr"].to_pylist()) == {
        "icmp",
        "job",
    }  # of a series without that label it is the name itself


@pytest.mark.parametrize(
    ("before", "time_s"),
    [
        ("1714557600 ", 1714557600.0),
        ("[1714557600.25] ", 1714557600.25),
        ("2024-05-01T10:00:00Z ", 1714557600.0),
        ("2024-05-01 12:00:00,5 +0200: ", 1714557600.5),
        ("[2024-05-01 10:00:00 UTC] ", 1714557600.0),
        ("Wed May  1 10:00:00 UTC 2024: ", 1714557600.0),
        ("[Wed May  1 10:00:00 2024] ", 1714557600.0),
        ("Wed May  1 12:00:00 CEST 2024: ", None),  # the names of zones are not unique
        ("May 01 10:00:00 ", None),
        ("10:00:00.123456 ", None),
        ("[2024-15-01 10:00:00] ", None),
    ],
)
def test_times_that_others_put_before_a_line_are_understood(before: str, time_s: float | None, tmp_path: Path) -> None:
    (tmp_path / "ping.log").write_text(f"{before}64 bytes from {A}: icmp_seq=1 ttl=64 time=5 ms\n")
    assert measured(read_table(tmp_path / "ping.log")) == [(time_s, "localhost", A, 5.0)]


def test_statistics_count_nothing_that_was_cut_off_before_the_file_begins(tmp_path: Path) -> None:
    (tmp_path / "fping.txt").write_text(
        f"{A} : [998], 64 bytes, 5 ms (5 avg, 0% loss)\n{A} : [999], 64 bytes, 5 ms (5 avg, 0% loss)\n\n"
        f"{A} : xmt/rcv/%loss = 1000/990/1%, min/avg/max = 5/5/5\n"
    )
    (tmp_path / "ping.txt").write_text(
        f"64 bytes from {A}: icmp_seq=999 ttl=64 time=5 ms\n64 bytes from {A}: icmp_seq=1000 ttl=64 time=5 ms\n\n"
        f"--- {A} ping statistics ---\n1000 packets transmitted, 990 received, 1% packet loss, time 999001ms\n"
    )
    for name in ("fping.txt", "ping.txt"):
        assert read_table(tmp_path / name)["rtt"].to_pylist() == [5.0, 5.0]


def test_a_report_of_many_packets_is_a_long_line(tmp_path: Path) -> None:
    (tmp_path / "fping.txt").write_text(f"{A} : {' '.join(['10.25'] * 300)} -\n")
    assert read_table(tmp_path / "fping.txt")["rtt"].to_pylist() == [10.25] * 300 + [None]


# Damaged and hostile files.


def outcome(path: Path) -> tuple[int, str]:
    """How many rows a file has, or what is wrong with it."""
    try:
        return read_table(path).num_rows, ""
    except PingLlmError as error:
        return 0, str(error)


@pytest.mark.parametrize("name", SAMPLES)
def test_damaged_files_give_fewer_rows_or_one_line(name: str, tmp_path: Path) -> None:
    sample, draw = SAMPLES[name], random.Random(name)
    text = sample.text.encode()
    damaged = [text[: draw.randrange(len(text))] for _ in range(30)]
    for _ in range(60):
        flipped = bytearray(text)
        for _ in range(draw.choice((1, 3, 20))):
            flipped[draw.randrange(len(text))] = draw.randrange(256)
        damaged.append(bytes(flipped))
    for _ in range(30):  # parts swapped
        cut, end = sorted(draw.randrange(len(text)) for _ in range(2))
        damaged.append(text[end:] + text[cut:end] + text[:cut])
    numbers = rb"(?<![\w.])\d+(?:\.\d+)?(?![\w.])"
    for value in (b"NaN", b"-1", b"1e400", b"null", b'"x"', b"99999999999999999999", b"[]", b"{}", b""):
        damaged += [re.sub(numbers, lambda match: value if draw.random() < 0.3 else match[0], text) for _ in range(3)]  # noqa: B023
    for number, content in enumerate(damaged):
        path = tmp_path / f"damaged-{number}.txt"
        path.write_bytes(content)
        rows, message = outcome(path)
        assert rows <= 70_000
        assert "\n" not in message
        assert not message or str(path) in message
        path.unlink()


@pytest.mark.parametrize("reader", ["globalping", "mtr", "prometheus", "scamper"])
def test_wrong_types_anywhere_in_a_document_raise_nothing_else(reader: str, tmp_path: Path) -> None:
    """Each value of each JSON sample, one after the other, becomes something else."""
    sample = next(one for one in SAMPLES.values() if one.reader == reader and one.text.startswith("{"))
    lines = sample.text.splitlines() if reader == "scamper" else [sample.text]
    documents = [json.loads(line) for line in lines]

    def changed(value: object, by: object) -> list[object]:
        if isinstance(value, dict):
            return [by, *({**value, key: one} for key, own in value.items() for one in changed(own, by))]
        if isinstance(value, list):
            return [
                by,
                *([*value[:i], one, *value[i + 1 :]] for i, own in enumerate(value) for one in changed(own, by)),
            ]
        return [by]

    path = tmp_path / sample.file
    others: list[object] = [None, [], {}, "", True, -1, 1e300, [None], {"sec": []}]
    for by in others:
        variants = changed(documents[-1 if reader != "scamper" else 1], by)
        path.write_text("\n".join([sample.text, *(json.dumps(variant) for variant in variants)]))
        assert read_table(path).num_rows >= len(sample.measured)


@pytest.mark.parametrize(
    "content",
    [
        "PING a (192.0.2.1) 56(84) bytes of data.\n"
        + "64 bytes from 192.0.2.1: icmp_seq=60000 ttl=64 time=1 ms\n" * 3000,
        "".join(
            f"PING a (192.0.2.1) 56(84) bytes of data.\n64 bytes from 192.0.2.1: icmp_seq={seq} ttl=64 time=1 ms\n"
            for seq in (30000,) * 5000
        ),
        "64 bytes from 192.0.2.1: icmp_seq=1 ttl=64 time=1 ms\n" + ("1.2.3.4 " * 12000 + "\n") * 10,
        "192.0.2.1 : 0.1\n" + "x" * (3 << 20),
        "192.0.2.1 : 0.1\n" + ("1 " * 30000 + "\n") * 10,
        "Pinging 192.0.2.1 with 32 bytes of data:\n" + ("1.1.1.1: " * 7000 + "\n") * 20,
        "ping,url=192.0.2.1 rtt=1 1700000000\n" + ("a" + ",b=c" * 15000 + " \n") * 30,
        "ping,url=192.0.2.1 rtt=1 1700000000\n" + ("a " + '"\\' * 30000 + "\n") * 30,
        '{"status":"success","data":{"resultType":"matrix"' + "[" * 100_000,
        '{"status":"success","data":{"resultType":"matrix"\n' + "}\n" * 300_000,
        "HOST: a Loss% Snt\n" + ("1." + " " * 60000 + "\n") * 20,
        "<rrd>\n" + ("<!-- " + "1234567890 --> " * 4000 + "\n") * 20,
    ],
    ids=lambda content: content[:24],
)
def test_hostile_files_take_bounded_time(content: str, tmp_path: Path) -> None:
    (tmp_path / "hostile").write_text(content)
    started = time.process_time()
    rows, message = outcome(tmp_path / "hostile")
    assert rows < 2_000_000
    assert len(message) < 1000
    assert time.process_time() - started < 20  # of the processor: minutes, where a pattern backtracks


def test_a_database_of_something_else_says_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "traffic.xml"
    path.write_text(SAMPLES["rrd_dump"].text.replace("ping", "port").replace("median", "octets"))
    with pytest.raises(PingLlmError, match="not of SmokePing: it has 'uptime, loss, octets, port1, port2"):
        read_table(path)


def test_a_file_without_measurements_says_so(tmp_path: Path) -> None:
    path = tmp_path / "range.json"
    path.write_text('{"status":"success","data":{"resultType":"matrix","result":[]}}')
    with pytest.raises(PingLlmError, match=r"range\.json: looks like what prometheus writes, but has no measurement"):
        read_table(path)
    path.write_text('{"status":"error","errorType":"bad_data","error":"parse error: unexpected end of input"}')
    with pytest.raises(PingLlmError, match="Prometheus answered with an error: 'parse error: unexpected end of input'"):
        read_table(path)


# Through what all commands use.


def test_files_of_tools_are_a_history_like_any_other(tmp_path: Path) -> None:
    known = read_observations([written(PING_D, tmp_path)])
    assert known.nodes == ("192.0.2.11", A)
    assert len(known.observations) == 7


def test_a_tool_without_times_gives_a_history_without_times(tmp_path: Path) -> None:
    options = InputOptions(columns={"src_addr": "ams1"})
    known = read_observations([written(SAMPLES["fping_each"], tmp_path)], options=options)
    assert known.nodes == (A, V6, "ams1")
    assert len(known.observations) == 8
    assert known.reading is not None
    assert known.reading.lines[0] == "read: output of fping, sent by 'ams1' if it does not say"
    assert not (known.observations.time_s == known.observations.time_s).any()


def test_an_upload_is_read_but_no_program_runs_over_its_bytes() -> None:
    assert len(read_upload(PING_D.text.encode(), 1000).observations) == 7
    assert len(read_upload(SAMPLES["prometheus_smokeping"].text.encode(), 1000).observations) == 3
    with pytest.raises(PingLlmError, match="a round-robin database: upload the output of `rrdtool dump`"):
        read_upload(b"RRD\x000003\x00", 1000)


def test_a_folder_of_logs_is_read_by_their_content(tmp_path: Path) -> None:
    (tmp_path / "pings.csv").write_text(f"event_time,src_addr,dst_addr,rtt\n1714557600,{HERE},{B},5\n")
    written(FPING_TIMES, tmp_path)
    (tmp_path / "README.md").write_text("Made by cron.\n")
    found = [files.describe(path, AS_FOUND, 1000)[0].format for path in files.expand([str(tmp_path)])]
    assert found == ["csv"]  # the names tell, as far as they do
    (tmp_path / "pings.csv").unlink()
    found = [files.describe(path, AS_FOUND, 1000)[0].format for path in files.expand([str(tmp_path)])]
    assert found == ["tool"]
