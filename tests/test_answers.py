"""Answers as people see them: tables that fit, matrices, `--watch`, and anomalies beside what was expected."""

import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from ping_llm.cli.anomalies import FOUND
from ping_llm.cli.answers import answers_table, heat_map
from ping_llm.cli.main import app
from ping_llm.cli.predict import followed, stamps
from ping_llm.core.console import err, out, print_error, progress
from ping_llm.core.errors import PingLlmError
from ping_llm.predict.matrix import Matrix
from ping_llm.predict.predictor import Predictor, load_history
from ping_llm.report.rendering import write_matrix
from ping_llm.rows.measurement_set import MeasurementSet

CHROMIUM = Path("/usr/bin/chromium")
NODES = [f"2001:db8:aaaa:bbbb:cccc:dddd:eeee:{number:x}" for number in range(1, 7)]
LEVELS = [0.05, 0.5, 0.95]


@pytest.fixture(scope="module")
def history() -> pd.DataFrame:
    """Six nodes on a line; every third pair is not measured, the last measurement is out of line."""
    rows = [(a, b) for a in range(6) for b in range(6) if a != b and (a + b) % 3]
    table = pd.DataFrame({"src_addr": [NODES[a] for a, _ in rows], "dst_addr": [NODES[b] for _, b in rows]})
    table["rtt"] = [10.0 * abs(a - b) + 5 for a, b in rows]
    table = pd.concat([table] * 3, ignore_index=True)
    table["event_time"] = 1_714_521_600 + 60 * np.arange(len(table))
    last = table.iloc[[-1]].assign(rtt=900.0, event_time=table["event_time"].max() + 60)
    return pd.concat([table, last], ignore_index=True)


@pytest.fixture(scope="module")
def answered(history: pd.DataFrame) -> pa.Table:
    asked = pa.table(
        {
            "src_addr": [a for a in NODES for b in NODES if a != b],
            "dst_addr": [b for a in NODES for b in NODES if a != b],
        }
    )
    return Predictor.from_pretrained(context=64).answered(asked, load_history(history), LEVELS)


@pytest.fixture
def file(history: pd.DataFrame, tmp_path: Path) -> Path:
    history.to_csv(tmp_path / "pings.csv", index=False)
    return tmp_path / "pings.csv"


def printed(renderables: Any, width: int, **terminal: Any) -> str:
    console = Console(file=io.StringIO(), width=width, **terminal)
    for one in renderables:
        console.print(one, crop=False, soft_wrap=isinstance(one, str), markup=False)
    return console.file.getvalue()  # type: ignore[attr-defined]


def run(*arguments: str | int | Path, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    if isinstance(done.exception, Exception):
        raise done.exception
    assert done.exit_code == code, done.stderr
    return done.stdout


# --- the table


@pytest.mark.parametrize("width", [160, 110, 80, 56, 32])
def test_a_table_fits_its_terminal_and_no_address_is_cut(answered: pa.Table, width: int) -> None:
    table, *_ = answers_table(answered.slice(0, 4), LEVELS, width)
    lines = printed([table], width).splitlines()
    assert max(map(len, lines)) <= width
    folded = "".join(line.split()[0] for line in lines if line.strip())
    assert all(node in folded or any(node in line for line in lines) for node in NODES[1:5])


def test_a_row_has_what_was_measured_what_is_predicted_and_what_it_rests_on(answered: pa.Table) -> None:
    text = printed(answers_table(answered.slice(0, 3), LEVELS, 200), 200)
    head, measured, unmeasured = (
        next(line for line in text.splitlines() if word in line) for word in ("source", NODES[1], NODES[3])
    )
    assert head.split()[2:] == ["measured", "5", "%", "median", "95", "%", "timeout", "rests", "on"]
    assert measured.split()[2] == "15.00"
    assert measured.endswith("6 of the pair ")
    assert unmeasured.endswith("2 hops ")
    assert len(unmeasured.split()) == len(measured.split()) - 3, "nothing was measured"


# --- the matrix


def test_a_matrix_in_a_pipe_is_numbers_between_tabs(file: Path) -> None:
    lines = [line.split("\t") for line in run("predict", "--history", file, "--matrix", "--context", 64).splitlines()]
    assert [line[0] for line in lines] == ["", *NODES]
    assert lines[0] == ["", *NODES]
    cells = np.array([line[1:] for line in lines[1:]])
    for (a, b), cell in np.ndenumerate(cells):
        if a == b:
            assert cell == ""
        elif (a + b) % 3:
            assert float(cell) == pytest.approx(10 * abs(a - b) + 5), "the median of what was measured"
        else:
            assert cell.endswith("~")
            assert 1 < float(cell[:-1]) < 200


@pytest.mark.parametrize(("width", "is_wide"), [(100, True), (56, False)])
def test_a_matrix_on_a_terminal_is_a_heat_map_that_fits(answered: pa.Table, width: int, is_wide: bool) -> None:
    matrix = Matrix.of(answered, LEVELS, NODES)
    coloured = printed([heat_map(matrix, width)], width, force_terminal=True, color_system="truecolor")
    assert len(set(re.findall(r"48;2;\d+;\d+;\d+", coloured))) > 4
    lines = printed([heat_map(matrix, width)], 200).splitlines()
    rows = [line for line in lines if line.startswith(tuple(f"{n} {NODES[n - 1]}" for n in range(1, 7)))]
    assert len(rows) == 6
    assert all(len(line) <= width for line in rows)
    assert rows[0].count("~") == 1
    assert ("15" in rows[0].partition(NODES[0])[2]) == is_wide, "where there is no room, colours have to do"


def test_more_than_fits_is_said(answered: pa.Table) -> None:
    matrix = Matrix.of(answered, LEVELS, NODES)
    assert "6 × 4 of 6 × 6: --output matrix.html shows all" in printed([heat_map(matrix, 47)], 200)


def test_a_matrix_as_a_page_is_one_file_that_asks_for_no_other(answered: pa.Table, tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)"
    renamed = answered.set_column(
        0, "src_addr", pa.array([hostile if a == NODES[0] else a for a in answered["src_addr"].to_pylist()])
    )
    write_matrix(Matrix.of(renamed, LEVELS, [hostile, *NODES]), LEVELS, tmp_path / "matrix.html")
    page = (tmp_path / "matrix.html").read_text()
    assert not re.search(r"(src|href)=|https?:|@import|url\(", page)
    assert hostile not in page
    data = json.loads(page.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])
    assert data["sources"][0] == hostile
    assert data["measured"][1] == 15.0
    assert data["predicted"][6] is not None
    assert data["levels"] == [0.05, 0.95]


@pytest.mark.skipif(not CHROMIUM.exists(), reason="Debian's chromium is not installed")
def test_the_page_tells_a_pair_in_words(answered: pa.Table, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    write_matrix(Matrix.of(answered, LEVELS, NODES), LEVELS, tmp_path / "matrix.html")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page, faults = browser.new_page(), []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.goto((tmp_path / "matrix.html").as_uri())
        page.locator("#matrix").focus()
        page.keyboard.press("ArrowRight")
        said = page.locator("#pair").inner_text()
        assert said.startswith(f"{NODES[0]} → {NODES[1]}: measured 15 ms, predicted ")
        page.select_option("#shown", "width")
        assert page.locator("#legend").inner_text().startswith("1.0 ×")
        assert not faults
        browser.close()


# --- following


def test_watch_prints_what_changed_survives_a_broken_file_and_ends_with_ctrl_c(file: Path) -> None:
    pair = ["--src", NODES[0], "--dst", NODES[1], "--dst", NODES[3]]
    command = [sys.executable, "-m", "ping_llm", "predict", "--history", str(file), *pair, "--context", "64"]
    with subprocess.Popen(
        [*command, "--watch", "0.2", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = json.loads(process.stdout.readline())["predictions"]
        assert process.stderr.readline().startswith("read: ")
        assert "rows used" in process.stderr.readline()
        whole = file.read_text()
        file.write_text("")
        assert "reading again" in process.stderr.readline()
        later = 1_714_600_000 + np.arange(30)
        file.write_text(whole + "".join(f"{NODES[0]},{NODES[1]},60.0,{time}\n" for time in later))
        changed = json.loads(process.stdout.readline())["predictions"]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""
    assert first[0]["measured"] == 15.0
    assert changed[0]["dst_addr"] == NODES[1]
    assert changed[0]["predictions"] > 1.5 * first[0]["predictions"]


def test_a_file_is_read_again_only_when_it_has_changed(file: Path) -> None:
    before = stamps([str(file)])
    assert before == stamps([str(file)])
    file.write_text(file.read_text() + "\n")
    assert before != stamps([str(file)])
    seen, read = iter([1, 1, 2, 2, 2, 3]), []

    def again() -> MeasurementSet:
        read.append("once")
        return load_history(None)

    states = followed(again, lambda: next(seen), 1, every_s=0.0)
    assert next(states)
    assert next(states)
    assert len(read) == 2
    assert not list(seen)


def test_only_a_history_can_be_watched() -> None:
    with pytest.raises(PingLlmError, match="--watch needs --history"):
        run("predict", "--src", NODES[0], "--dst", NODES[1], "--watch", 1)


# --- anomalies


def test_an_anomaly_is_shown_beside_what_was_expected(file: Path) -> None:
    found = json.loads(run("anomalies", file, "--last", 4, "--top", 2, "--score", "tail", "--timeline", "--json"))
    assert (found["measurements"], found["score"], found["timeouts"]) == (4, "tail", 0)
    assert 0 < found["expected_timeouts"] < 1
    worst, other = found["anomalies"]
    assert worst["rtt"] == 900
    assert worst["low"] < worst["expected"] < worst["high"] < 900
    assert worst["score"] == pytest.approx(-np.log2(worst["tail"]))
    assert worst["score"] > other["score"] + 3
    assert [slot["measurements"] for slot in found["timeline"]] == [1, 1, 1, 1]
    assert found["timeline"][-1]["highest_score"] == pytest.approx(worst["score"])
    shown = run("anomalies", file, "--last", 2, "--timeline")
    assert f"{worst['low']:.2f} to {worst['high']:.2f}" in shown
    assert shown.splitlines()[-1].startswith("2 measurements, score ")


def test_anomalies_are_a_check(file: Path, tmp_path: Path) -> None:
    arguments = ("anomalies", file, "--last", 1, "--score", "tail", "--output", tmp_path / "scored.csv")
    assert "900.00" in run(*arguments, "--fail-above", 5, code=FOUND)
    assert {"expected", "low", "high", "p_failed", "tail", "bits"} < set(pd.read_csv(tmp_path / "scored.csv"))
    run(*arguments, "--fail-above", 50)
    with pytest.raises(PingLlmError, match="no input file matches"):
        run("anomalies", "nosuch.csv", "--fail-above", 5)


def test_without_times_nothing_was_before(history: pd.DataFrame, tmp_path: Path) -> None:
    history.drop(columns="event_time").to_csv(tmp_path / "untimed.csv", index=False)
    with pytest.raises(PingLlmError, match="anomalies need times"):
        run("anomalies", tmp_path / "untimed.csv")


# --- progress


def test_progress_in_a_pipe_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("reading", every_s=0.0) as advance:
        advance(5)
        advance(10, total=60)
    with progress("reading", total=3) as advance:
        advance()
    lines = re.sub(r"after \d+ s", "after 0 s", capsys.readouterr().err).splitlines()
    assert lines == ["reading: 5 after 0 s", "reading: 15 of 60 (25%) after 0 s"]


def test_groups_of_an_address_are_not_taken_for_names_of_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    address = "2001:db8:a:b:cd:abc:bee:1"
    table = Table(title=address)
    table.add_column(address)
    table.add_row(address)
    out.print(address)
    out.print(table)
    err.print(address)
    print_error(address)
    written = capsys.readouterr()
    assert written.out.count(address) == 4
    assert written.err.count(address) == 2
