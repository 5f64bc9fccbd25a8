"""Questions and histories that are wrong in type or value: one line that names the row or column, never a trace."""

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from ping_llm.cli.main import app
from ping_llm.core.errors import PingLlmError
from ping_llm.predict.predictor import Predictor

A, B, V6 = "192.0.2.1", "192.0.2.2", "2001:db8::1"
KNOWN: dict[str, Any] = {"src_addr": [A, B], "dst_addr": [B, A], "rtt": [3.0, 4.0]}


@pytest.fixture(scope="module")
def shipped() -> Predictor:
    return Predictor.from_pretrained(context=8)


def refusal(predictor: Predictor, questions: Any, **options: Any) -> str:
    with pytest.raises(PingLlmError) as refused:
        predictor.predict_df(questions, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"src_addr": [1.5]}, "the questions: column src_addr has type double; expected text, such as 192.0.2.1"),
        ({"src_addr": [b"192.0.2.1"]}, "column src_addr has type binary"),
        ({"dst_addr": [["192.0.2.1"]]}, "column dst_addr has type list"),
        ({"dst_addr": pa.array([1.5]).dictionary_encode()}, "column dst_addr has type dictionary"),
        ({"src_addr": [math.nan]}, "column src_addr has type double"),
        ({"src_addr": [None]}, "question 1: src_addr None is neither an address nor a name"),
        ({"src_addr": [V6]}, f"question 1: {V6} and {B} are not of one family"),
        ({"event_time": [math.nan]}, "question 1: nan is not a time"),
        ({"event_time": [math.inf]}, "question 1: inf is not a time"),
        ({"event_time": [-5]}, "question 1: -5 is not a time between 1970 and 2100"),
        ({"event_time": [-5.0]}, "question 1: -5.0 is not a time between 1970 and 2100"),
        ({"event_time": [1e300]}, "is not a time between 1970 and 2100"),
        ({"event_time": ["1950-01-01"]}, "question 1: 1950-01-01 is not a time between 1970 and 2100"),
        ({"event_time": [True]}, "the questions: column event_time has type bool"),
    ],
)
def test_questions_of_a_wrong_type_or_value_are_named(shipped: Predictor, columns: Any, message: str) -> None:
    assert message in refusal(shipped, pa.table({"src_addr": [A], "dst_addr": [B]} | columns))


@pytest.mark.parametrize("sources", [[A, 5], [A, b"x"], [{A: 1}]], ids=["int", "bytes", "dict"])
def test_a_pandas_column_of_several_types_is_one_line(shipped: Predictor, sources: list[Any]) -> None:
    frame = pd.DataFrame({"src_addr": sources, "dst_addr": [B] * len(sources)})
    assert "the questions" in refusal(shipped, frame)


def test_a_missing_address_in_pandas_is_named_by_its_row(shipped: Predictor) -> None:
    frame = pd.DataFrame({"src_addr": [A, math.nan], "dst_addr": [B, B]})
    assert "question 2: src_addr None is neither an address nor a name" in refusal(shipped, frame)


@pytest.mark.parametrize("name", ["dst_addr", "p_failed", "note"])
def test_two_columns_of_one_name_are_refused(shipped: Predictor, name: str) -> None:
    values, names = [A, B, B, B], ["src_addr", "dst_addr", name, name][: 3 if name == "dst_addr" else 4]
    message = f"two columns are called {name!r}: rename or drop one"
    assert message in refusal(shipped, pa.table([[value] for value in values[: len(names)]], names=names))
    assert "Duplicate column names" in refusal(shipped, pd.DataFrame([values[: len(names)]], columns=names))
    history = pa.table([[A], [B], [1.0], [B], [B]], names=["src_addr", "dst_addr", "rtt", name, name])
    refused = refusal(shipped, pa.table({"src": [A], "dst": [B]}), history=history)
    assert f"the history: {message}" in refused


@pytest.mark.parametrize(
    "levels", [[0], [1], [-1], [2], [math.nan], ["a"], [None], [True], 0.5, "0.5", [0.1, 0.1 + 1e-9]]
)
def test_levels_that_are_no_quantiles_are_refused_before_anything_is_computed(shipped: Predictor, levels: Any) -> None:
    message = "write levels between 0 and 1 such as 0.1,0.5,0.9"
    assert message in refusal(shipped, pa.table({"src": [A], "dst": [B]}), history="nosuch.csv", quantile_levels=levels)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"rtt": [True, False]}, "the history: column 'rtt' has type bool; expected numbers"),
        ({"rtt": [b"1", b"2"]}, "the history: column 'rtt' has type binary"),
        ({"src_addr": [1.5, 2]}, "the history: column 'src_addr' has type double"),
        ({"src_addr": [b"192.0.2.1", b""]}, "the history: column 'src_addr' has type binary"),
        ({"event_time": [[1], [2]]}, "the history: column 'event_time' has type list"),
        ({"src_addr": ["?", "10.0.0.300"]}, "no usable measurement"),
        ({"rtt": [math.inf, 1e300]}, "no usable measurement"),
        ({name: pa.array([], pa.string()) for name in KNOWN}, "no usable measurement in the input; left out: none"),
    ],
)
def test_a_history_of_wrong_types_or_values_is_one_line(
    shipped: Predictor, tmp_path: Path, columns: Any, message: str
) -> None:
    asked, table = pa.table({"src": [A], "dst": [B]}), pa.table(KNOWN | columns)
    assert message in refusal(shipped, asked, history=table)
    pq.write_table(table, tmp_path / "history.parquet")
    of_file = refusal(shipped, asked, history=tmp_path / "history.parquet")
    assert "history.parquet: column" in of_file or message in of_file


@pytest.mark.parametrize("history", [5, [5], {"a": 1}, b"abc", [pa.table(KNOWN)], object()])
def test_what_is_no_history_is_refused(shipped: Predictor, history: Any) -> None:
    refused = refusal(shipped, pa.table({"src": [A], "dst": [B]}), history=history)
    assert "the history: expected a data frame of pandas, Polars or Arrow" in refused


@pytest.mark.parametrize("settings", [{"context": 0}, {"context": "a"}, {"votes": 0}, {"clusters": 1.5}])
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(PingLlmError, match=f"{next(iter(settings))} must be a whole number of at least"):
        Predictor.from_pretrained(**settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("src_addr,dst_addr\n192.0.2.1\n", "cannot read"),
        ("src_addr,dst_addr\n192.0.2.1,192.0.2.2,5\n", "cannot read"),
        ("src_addr,dst_addr\n192.0.2.1,\n", "question 1: dst_addr '' is neither an address nor a name"),
        ("src_addr,dst_addr,dst_addr\n192.0.2.1,192.0.2.2,192.0.2.3\n", "two columns are called 'dst_addr'"),
        ("src_addr,dst_addr\n192.0.2.1,2001:db8::1\n", "not of one family"),
        (
            "src_addr,dst_addr,event_time\n192.0.2.1,192.0.2.2,-7\n",
            "question 1: -7 is not a time between 1970 and 2100",
        ),
        ("src_addr,dst_addr,event_time\n192.0.2.1,192.0.2.2,true\n", "column event_time has type bool"),
        ("src_addr,dst_addr\n192.0.2.1,\xff\n", "cannot read"),
        ("src,dst\n1.2,2\n", "question 1: src_addr '1.2' is neither an address nor a name"),
    ],
)
def test_a_file_of_questions_with_a_broken_row_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "questions.csv").write_bytes(text.encode("latin-1"))
    done = CliRunner().invoke(app, ["predict", "--questions", str(tmp_path / "questions.csv")])
    assert isinstance(done.exception, PingLlmError), done.output
    assert message in str(done.exception)
    assert "\n" not in str(done.exception)


def test_a_matrix_of_both_families_has_only_pairs_that_can_be_pinged(tmp_path: Path) -> None:
    lines = [f"{A},{B},3", f"{B},{A},3", f"{V6},2001:db8::2,9"]
    (tmp_path / "pings.csv").write_text("\n".join(["src,dst,rtt", *lines]))
    output = tmp_path / "matrix.csv"
    done = CliRunner().invoke(app, ["predict", "--history", str(tmp_path / "pings.csv"), "--matrix", "-o", str(output)])
    assert not done.exception, done.exception
    assert [line.partition(",")[0].strip('"') for line in output.read_text().splitlines()[1:]] == [A, B, V6]
