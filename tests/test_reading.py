"""The one reader: however a table is written, it gives the same measurements, or says in a line why it cannot."""

import gzip
import json
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ping_llm.cli.main import app
from ping_llm.core.errors import PingLlmError
from ping_llm.core.measurements import spelled_addresses
from ping_llm.core.rtt import Questions
from ping_llm.predict.predictor import load_history
from ping_llm.predict.prompts import Histories, prompts_for
from ping_llm.rows.measurement_set import MeasurementSet, joined, read_observations, rows_observations
from ping_llm.rows.prepare import PrepareSettings, prepare
from ping_llm.sources.columns import InputOptions
from ping_llm.tokens.decode import decode
from split_fixtures import Measurement, plain

TIME = 1_714_564_800  # 2024-05-01 12:00 UTC
Row = tuple[int, str, str, float | None]
ROWS: list[Row] = [
    (TIME + 86_400 * i, f"10.0.0.{i % 5 + 1}", f"192.0.2.{i % 3 + 1}", 7.25 + i if i % 9 else None) for i in range(36)
]
EXPECTED: list[Measurement] = [(source, destination, float(at), rtt) for at, source, destination, rtt in ROWS]


def found(measured: MeasurementSet) -> list[Measurement]:
    return sorted(plain(measured.nodes, measured.observations), key=lambda m: (m[2] or 0, m[:2]))


def read(path: Path, **options: Any) -> MeasurementSet:
    return read_observations([path], options=InputOptions(**options))


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(PingLlmError) as caught:
        read(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def table(rows: Sequence[Sequence[Any]], delimiter: str = ",") -> str:
    return "".join(delimiter.join(map(str, row)) + "\n" for row in rows)


def csv(rows: Sequence[Row], rtt: str = "rtt") -> str:
    return table([("time", "src", "dst", rtt), *((t, s, d, "" if r is None else r) for t, s, d, r in rows)])


# Each spelling of the same table gives the same measurements.

TIMES: dict[str, Callable[[int], str]] = {
    "epoch s": str,
    "epoch ms": lambda t: str(t * 1_000),
    "epoch us": lambda t: str(t * 1_000_000),
    "epoch ns": lambda t: str(t * 1_000_000_000),
    "iso": lambda t: datetime.fromtimestamp(t, UTC).isoformat(),
    "iso naive": lambda t: datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%d %H:%M:%S"),
    "iso zone": lambda t: datetime.fromtimestamp(t + 7200, UTC).strftime("%Y-%m-%dT%H:%M:%S+02:00"),
    "points": lambda t: datetime.fromtimestamp(t, UTC).strftime("%d.%m.%Y %H:%M:%S"),
    "american": lambda t: datetime.fromtimestamp(t, UTC).strftime("%m/%d/%Y %I:%M:%S %p"),
    "british": lambda t: datetime.fromtimestamp(t, UTC).strftime("%d/%m/%Y %H:%M:%S"),
    "month": lambda t: datetime.fromtimestamp(t, UTC).strftime("%d-%b-%Y %H:%M:%S"),
}
PER_MS = {"ms": 1, "us": 1000, "s": 0.001, "ns": 1_000_000}
HEADERS = {
    "event_time": ("event_time", "Timestamp", "TIME", "ts", "Date/Time", "when"),
    "src_addr": ("src_addr", "Source", "ip_src", "from", "SourceIP", "probe"),
    "dst_addr": ("dst_addr", "Destination", "ip_dst", "to", "Target", "target_ip"),
    "rtt": ("rtt", "RTT", "Latency", "delay", "avg", "rtt_avg", "ping"),
}


def in_unit(rtt: float, unit: str) -> str:
    return f"{rtt * PER_MS[unit]:.9f}".rstrip("0").rstrip(".")


@st.composite
def spellings(draw: st.DrawFn) -> tuple[str, str]:
    """ROWS as text, and how that was done."""
    delimiter, unit = draw(st.sampled_from(",;\t|")), draw(st.sampled_from(list(PER_MS)))
    unit_in = draw(st.sampled_from(["(header)", "[header]", "_header", "cell", "cell without blank"]))
    comma = draw(st.booleans()) and delimiter != ","
    kind, port = draw(st.sampled_from(list(TIMES))), draw(st.sampled_from(["", ":443"]))
    missing = draw(st.sampled_from(["", "*", "timeout", "-1", "N/A", "null"]))
    names = {column: draw(st.sampled_from(choices)) for column, choices in HEADERS.items()}
    names["rtt"] += {"(header)": f" ({unit})", "[header]": f" [{unit}]", "_header": f"_{unit}"}.get(unit_in, "")
    suffix = {"cell": f" {unit}", "cell without blank": unit}.get(unit_in, "")
    order = draw(st.permutations(list(HEADERS)))
    with_header = draw(st.booleans()) or "header" in unit_in or kind in ("epoch s",)
    extra = draw(st.booleans()) and with_header
    lines = []
    for at, source, destination, rtt in ROWS:
        value = missing if rtt is None else in_unit(rtt, unit).replace(".", "," if comma else ".") + suffix
        cells = {
            "event_time": TIMES[kind](at),
            "src_addr": source + port,
            "dst_addr": destination,
            "rtt": value,
        }
        lines.append([cells[column] for column in order] + ["note"] * extra)
    if with_header:
        lines.insert(0, [names[column] for column in order] + ["comment"] * extra)
    elif order.index("src_addr") > order.index("dst_addr"):  # without a header, the source comes first
        lines = [[line[order.index(_swapped(column))] for column in order] for line in lines]
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    text = newline.join(delimiter.join(line) for line in lines) + newline
    return draw(st.sampled_from(["", "\ufeff"])) + text, f"{delimiter!r} {unit} {unit_in} {kind} {order}"


def _swapped(column: str) -> str:
    return {"src_addr": "dst_addr", "dst_addr": "src_addr"}.get(column, column)


@settings(max_examples=150, deadline=None)
@given(spellings())
def test_every_spelling_of_a_table_gives_the_same_measurements(
    tmp_path_factory: pytest.TempPathFactory, spelling: tuple[str, str]
) -> None:
    path = tmp_path_factory.mktemp("spelling") / "pings"
    path.write_text(spelling[0], encoding="utf-8", newline="")
    measured = read(path)
    assert [m[:3] for m in found(measured)] == [m[:3] for m in EXPECTED], spelling[1]
    rtts = np.array([m[3] for m in EXPECTED], dtype=float)
    np.testing.assert_allclose(measured.observations.rtt_ms, rtts, rtol=1e-6, err_msg=spelling[1])
    assert measured.dropped == {}


@pytest.mark.parametrize("kind", ["objects", "lines", "parquet", "gzip", "pandas", "arrow", "blanks", "two columns"])
def test_every_container_of_a_table_gives_the_same_measurements(tmp_path: Path, kind: str) -> None:
    path, names = tmp_path / "pings", ("ts", "Source", "Target", "latency_ms")
    columns = {name: [row[i] for row in ROWS] for i, name in enumerate(names)}
    objects = [dict(zip(columns, row, strict=True)) for row in ROWS]
    history: Any = path
    if kind == "objects":
        path.write_text(json.dumps(objects))
    elif kind == "lines":
        path.write_text("\n".join(map(json.dumps, objects)))
    elif kind == "parquet":
        pq.write_table(pa.table(columns), path)
    elif kind == "gzip":
        path.write_bytes(gzip.compress(csv(ROWS, "latency ms").encode()))
    elif kind == "pandas":
        history = pd.DataFrame(columns)
    elif kind == "arrow":
        history = pa.table(columns)
    elif kind == "blanks":
        path.write_text("".join(f"  {t}   {s} {d}  {'*' if r is None else f'{r:.3f}'}\n" for t, s, d, r in ROWS * 1))
    else:
        dated = ((f"{datetime.fromtimestamp(t, UTC):%d.%m.%Y;%H:%M:%S}", s, d, r or "*") for t, s, d, r in ROWS)
        path.write_text(table([("Date", "Time", "from", "to", "ms"), *dated], ";"))
    measured = load_history(history)
    assert found(measured) == EXPECTED
    assert measured.reading is not None
    assert (measured.reading.used, measured.reading.timeouts) == (36, 4)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_tables_are_read_or_refused_in_one_line(tmp_path: Path, seed: int) -> None:
    rng, path = random.Random(seed), tmp_path / "pings"
    pieces = [
        *",;\t \n|\"'{[#:/",
        "\r\n",
        "NaN",
        "\0",
        "-1",
        "1e400",
        "(us)",
        "9" * 30,
        "2024-05-01",
        "PAR1",
        "sep=;\n",
    ]
    for _ in range(100):
        text = csv(ROWS[:12]) if rng.random() < 0.7 else json.dumps([{"src": "a", "dst": "b", "ms": 3}] * 5)
        for _ in range(rng.choice([1, 3, 12])):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(pieces) + text[at + rng.choice([0, 0, 5, 60]) :]
        path.write_text(text)
        with suppress(PingLlmError):
            read(path)


# What is said, and what is refused.


def test_two_lines_say_what_was_read(tmp_path: Path) -> None:
    rows = [(f"{t}", s, d, str(r).replace(".", ",")) for t, s, d, r in ROWS if r is not None]
    rows += [rows[0], rows[0], (str(TIME), "10.0.0.1", "192.0.2.1", "abc"), (str(TIME), "10.0.0.1", "192.0.2.1", "0")]
    path = tmp_path / "pings"
    path.write_text(table([("Zeit", "Source", "ip_dst", "RTT (ms)"), *rows], ";"))
    done = CliRunner().invoke(app, ["predict", "--history", str(path), "--columns", "event_time=Zeit", "--matrix"])
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[:2] == [
        "read: time 'Zeit', source 'Source', destination 'ip_dst', RTT 'RTT (ms)' in ms (its name) with decimal commas"
        "; semicolons",
        "32 of 36 rows used, 0 of them timeouts; 8 nodes; 2024-05-02 12:00:00 to 2024-06-05 12:00:00 UTC; left out: "
        "2 duplicate, 1 bad_rtt (line 36: rtt=abc), 1 zero_rtt",
    ]


@pytest.mark.parametrize(("per_ms", "says"), [(1000, "25,250 ms"), (0.001, "0.025 ms")])
def test_rtts_of_an_implausible_size_need_a_unit(tmp_path: Path, per_ms: float, says: str) -> None:
    rows = [(t, s, d, None if r is None else r * per_ms) for t, s, d, r in ROWS]
    (tmp_path / "pings").write_text(csv(rows))
    assert says in refusal(tmp_path / "pings")
    assert "say --rtt-unit" in refusal(tmp_path / "pings")
    unit = "us" if per_ms > 1 else "s"
    rtts = np.array([m[3] for m in EXPECTED], dtype=float)
    np.testing.assert_allclose(read(tmp_path / "pings", rtt_unit=unit).observations.rtt_ms, rtts, rtol=1e-6)
    assert len(read(tmp_path / "pings", allow_bad_rows=True).observations) == 36


def test_a_unit_that_its_values_contradict_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pings").write_text(csv([(t, s, d, r and r * 1000) for t, s, d, r in ROWS], "rtt_ms"))
    assert "implausible for ms" in refusal(tmp_path / "pings")


def test_a_table_of_which_much_is_unusable_is_refused_unless_told_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "pings").write_text(csv(ROWS).replace(",,", ",NaN,") + table([(TIME, "10.0.0.1", "?", 3)] * 5))
    assert "5 of 41 rows cannot be used: 5 bad_dst_addr (line 38: dst_addr=?)" in refusal(tmp_path / "pings")
    measured = read(tmp_path / "pings", allow_bad_rows=True)
    assert measured.dropped == {"bad_dst_addr": 5}
    assert len(measured.observations) == 36


def test_dates_that_may_be_of_two_months_are_refused_until_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "pings").write_text(table([("time", "src", "dst", "rtt"), ("03/04/2024 12:00", "a", "b", 7)]))
    assert "write --date-order dmy or mdy" in refusal(tmp_path / "pings")
    days = [read(tmp_path / "pings", date_order=order).observations.time_s[0] for order in ("dmy", "mdy")]
    assert [datetime.fromtimestamp(day, UTC).month for day in days] == [4, 3]


def test_nan_as_text_is_unusable_and_in_pandas_a_timeout(tmp_path: Path) -> None:
    rows = [(t, s, d, r) for t, s, d, r in ROWS if r is not None]
    (tmp_path / "pings").write_text(csv([*rows, (TIME, "10.0.0.1", "10.0.0.2", float("nan"))]))
    assert read(tmp_path / "pings").dropped == {"bad_rtt": 1}
    frame = pd.DataFrame(rows, columns=["time", "src", "dst", "rtt"])
    frame.loc[0, "rtt"] = float("nan")
    reading = load_history(frame).reading
    assert reading is not None
    assert (reading.timeouts, dict(reading.dropped)) == (1, {})


# Copies.


def test_copies_count_once_however_they_came(tmp_path: Path) -> None:
    (tmp_path / "five.csv").write_text(csv([row for row in ROWS for _ in range(5)]))
    measured = read(tmp_path / "five.csv")
    assert found(measured) == EXPECTED
    assert measured.dropped == {"duplicate": 144}
    (tmp_path / "a.csv").write_text(csv(ROWS))
    (tmp_path / "b.csv").write_text(csv(ROWS))
    both = read_observations([tmp_path / "a.csv", tmp_path / "b.csv"])
    assert found(both) == EXPECTED
    assert both.reading is not None
    assert f"{tmp_path}/b.csv is a copy of {tmp_path}/a.csv" in both.reading.lines[0]
    manifest, _ = prepare(PrepareSettings(inputs=(str(tmp_path / "*.csv"),), output=tmp_path / "rows", workers=1))
    assert (manifest.read, manifest.written, manifest.dropped) == (36 * 7, 36, {"duplicate": 36 * 6})


def test_equal_rtts_without_times_are_no_copies(tmp_path: Path) -> None:
    (tmp_path / "pings").write_text("src,dst,rtt\n" + "a,b,7\n" * 3)
    assert len(read(tmp_path / "pings").observations) == 3


# Names.


def named(rows: Sequence[Row]) -> list[Row]:
    return [(t, f"site {s[-1]}", f"{d.replace('.', '-')}.example.net", r) for t, s, d, r in rows]


def test_nodes_may_be_names(tmp_path: Path) -> None:
    (tmp_path / "pings").write_text(csv(named(ROWS)))
    measured = read(tmp_path / "pings")
    assert found(measured) == [(s, d, float(t), r) for t, s, d, r in named(ROWS)]
    assert list(measured.nodes) == sorted(measured.nodes)
    assert measured.reading is not None
    assert "8 nodes (8 by name)" in measured.reading.lines[1]


def test_a_nodes_file_gives_names_their_addresses(tmp_path: Path) -> None:
    (tmp_path / "pings").write_text(csv([*named(ROWS), (TIME + 5, "10.0.0.1", "192.0.2.1", 9.0)]))
    nodes = tmp_path / "nodes.csv"
    nodes.write_text("Name;IP;lat;lon;AS\nsite 1;10.0.0.1;51,5;-0,1;64500\nnowhere;;;;\n")
    measured = read(tmp_path / "pings", nodes=str(nodes))
    assert "10.0.0.1" not in measured.nodes, "the address has a name"
    assert measured.addresses_of(["site 1", "site 2", "192.0.2.1"]) == ("10.0.0.1", "site 2", "192.0.2.1")
    node = measured.described["site 1"]
    assert (node.latitude, node.longitude, node.asn) == (51.5, -0.1, "64500")
    assert joined([measured, measured]).described == measured.described


@pytest.mark.parametrize("with_nodes_file", [False, True])
def test_names_survive_preparation(tmp_path: Path, with_nodes_file: bool) -> None:
    mixed = [(t, "site 1", d, r) for t, _, d, r in ROWS[30:]]
    (tmp_path / "pings").write_text(csv([*named(ROWS[:20]), *ROWS[20:30], *mixed]))
    options = InputOptions()
    if with_nodes_file:
        (tmp_path / "nodes.csv").write_text("name,address,lat,lon\nsite 1,198.51.100.9,50,8\nsite 2,2001:db8::2,,\n")
        options = InputOptions(nodes=str(tmp_path / "nodes.csv"))
    settings = PrepareSettings(inputs=(str(tmp_path / "pings"),), output=tmp_path / "rows", input_options=options)
    manifest, _ = prepare(settings)
    assert manifest.written == 36
    parts = [rows_observations(tmp_path / "rows", split) for split in ("train", "eval")]
    assert found(joined([part for part in parts if part.nodes])) == found(read(tmp_path / "pings"))
    if with_nodes_file:
        assert (parts[0].described["site 1"].latitude, parts[0].described["site 2"].latitude) == (50.0, None)


def test_the_language_model_reads_names_by_what_stands_in_for_them(tmp_path: Path) -> None:
    rows = [(TIME, "10.0.0.1", "192.0.2.1", 5.0), (TIME + 1, "10.0.0.1", "lon", 7.0), (TIME + 2, "nyc", "lon", 9.0)]
    (tmp_path / "pings").write_text(csv(rows))
    measured = read(tmp_path / "pings")
    number = {node: i for i, node in enumerate(measured.nodes)}
    lon, nyc = spelled_addresses(["lon", "nyc"])

    def prompted(source: str, destination: str) -> list[tuple[str, str]]:
        ends = {"source": np.array([number[source]]), "destination": np.array([number[destination]])}
        questions = Questions(**ends, time_s=np.array([np.nan]))
        (prompt,) = prompts_for(measured.observations, questions, measured.nodes, 1024)
        return [(one.source, one.destination) for one in decode(prompt.history).measurements]

    assert prompted("10.0.0.1", "192.0.2.1") == [("10.0.0.1", "192.0.2.1")]
    assert prompted("10.0.0.1", "lon") == [("::ffff:10.0.0.1", "::ffff:192.0.2.1"), ("::ffff:10.0.0.1", lon)]
    assert prompted("nyc", "192.0.2.1") == [(nyc, lon)]
    own = Histories(measured.observations, measured.nodes).own(number["10.0.0.1"])
    assert (own.source_address, len(own)) == ("10.0.0.1", 1)


# Matrices.


@pytest.mark.parametrize("corner", ["", "from\\to", "source", "RTT (ms)"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_matrix_has_a_measurement_in_each_cell(tmp_path: Path, corner: str, delimiter: str) -> None:
    cells = [(corner, "lon", "nyc", "fra"), ("lon", 0, 71.5, ""), ("nyc", 70.25, "", "*"), ("fra", 12, -1, 0)]
    (tmp_path / "pings").write_text(table(cells, delimiter))
    measured = read(tmp_path / "pings")
    assert {m[:2]: m[3] for m in plain(measured.nodes, measured.observations)} == {
        ("lon", "nyc"): 71.5,
        ("nyc", "lon"): 70.25,
        ("nyc", "fra"): None,
        ("fra", "lon"): 12.0,
    }
    assert measured.reading is not None
    assert "matrix" in measured.reading.lines[0]


def test_a_matrix_may_be_of_other_destinations_and_in_microseconds(tmp_path: Path) -> None:
    (tmp_path / "pings").write_text("probe,192.0.2.1,192.0.2.2\n10.0.0.1,7100 us,9 ms\n10.0.0.2,*,0.011 s\n")
    measured = read(tmp_path / "pings")
    np.testing.assert_allclose(measured.observations.rtt_ms, [7.1, 9, np.nan, 11])


def test_a_matrix_may_be_wider_than_what_is_looked_at_first(tmp_path: Path) -> None:
    names = [f"node-{i:04}.example.net" for i in range(4_000)]
    rows = [["", *names], *([name, *["7.1"] * len(names)] for name in names[:3])]
    (tmp_path / "pings").write_text(table(rows))
    measured = read(tmp_path / "pings")
    assert (len(measured.nodes), len(measured.observations)) == (4_000, 3 * 3_999)


def test_a_matrix_may_be_a_data_frame() -> None:
    frame = pd.DataFrame([[np.nan, 7.1], [7.3, np.nan]], index=["lon", "nyc"], columns=["lon", "nyc"])
    for history in (frame, pa.Table.from_pandas(frame.reset_index(names="node"))):
        measured = load_history(history)
        assert {m[:2] for m in plain(measured.nodes, measured.observations)} == {("lon", "nyc"), ("nyc", "lon")}


# Without a header; and RIPE Atlas results by any name.


def test_columns_without_a_header_are_named_by_number_where_cells_do_not_tell(tmp_path: Path) -> None:
    rows = [(s, d, 3 + i % 5, r or 1) for i, (_, s, d, r) in enumerate(ROWS)]
    (tmp_path / "pings").write_text(table([(*row, 64 + i) for i, row in enumerate(rows)]).replace(".25", ""))
    assert "the cells do not tell which column is rtt" in refusal(tmp_path / "pings")
    assert len(read(tmp_path / "pings", columns={"rtt": "4"}).observations) == 36


ATLAS = {"fw": 5000, "type": "ping", "prb_id": 6012, "msm_id": 1001, "af": 4, "from": "192.0.2.1", "timestamp": TIME}
RESULT = ATLAS | {"dst_addr": "198.51.100.7", "result": [{"rtt": 12.5}, {"rtt": 11.5}]}


@pytest.mark.parametrize("name", ["pings.txt", "pings", "pings.csv", "pings.json"])
def test_atlas_results_are_known_by_what_they_are(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(json.dumps([RESULT]))
    assert found(read(tmp_path / name)) == [("192.0.2.1", "198.51.100.7", float(TIME), 11.5)]
    by_id = read(tmp_path / name, columns={"src_addr": "prb_id"})
    assert found(by_id) == [("6012", "198.51.100.7", float(TIME), 11.5)]


def test_what_is_quoted_from_a_file_commands_no_terminal(tmp_path: Path) -> None:
    (tmp_path / "pings.csv").write_text("a\x1b[31mb,c\n1,2\n3,4\n")
    assert "it has: a\\x1b[31mb, c" in refusal(tmp_path / "pings.csv")
    (tmp_path / "pings.csv").write_text("src_addr,dst_addr,rtt\na\x1b[31mb,c,12\n" + "c,d,20\n" * 30)
    reading = read(tmp_path / "pings.csv").reading
    assert reading
    assert "bad_src_addr (line 2: src_addr=a\\x1b[31mb)" in reading.lines[1]
