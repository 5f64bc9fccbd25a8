"""Predictions through the one interface of both models, from files and data frames, with the weights of the package."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from flax import nnx
from pyarrow import csv
from typer.testing import CliRunner

from ping_llm.cli.main import app
from ping_llm.core.errors import DroppedRowsWarning, PingLlmError
from ping_llm.core.rtt import Observations, Questions, RttDistribution
from ping_llm.models.completer.inference import Completer
from ping_llm.models.modules import by_name
from ping_llm.predict.language_model import LanguageModel
from ping_llm.predict.predictor import Predictor, load_history
from ping_llm.runs.task import task_of
from ping_llm.runs.trained import SHIPPED, Trained, load_trained
from ping_llm.runs.weights import save_trained
from ping_llm.training import train
from training_fixtures import simulated_rows, tiny_config

NODES = 24
ADDRESSES = [f"192.0.2.{n}" for n in range(NODES)]
CONTEXT = 256


def plane(seed: int = 0, share: float = 0.5) -> tuple[pa.Table, pa.Table]:
    """Nodes in a plane with access delays: known pairs, and pairs to ask with their true RTTs."""
    random = np.random.default_rng(seed)
    place, access = random.normal(size=(NODES, 2)) * 30, random.exponential(4, NODES)
    one, other = np.triu_indices(NODES, 1)
    rtt = np.hypot(*(place[one] - place[other]).T) + access[one] + access[other] + 1
    known = random.random(len(one)) < share

    def table(rows: np.ndarray) -> pa.Table:
        ends = ([ADDRESSES[n] for n in column[rows]] for column in (one, other))
        return pa.table([*ends, rtt[rows]], names=["src_addr", "dst_addr", "rtt"])

    return table(known), table(~known)


@pytest.fixture(scope="module")
def shipped() -> Predictor:
    return Predictor.from_pretrained(context=CONTEXT)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model of random weights."""
    folder = tmp_path_factory.mktemp("exported")
    config = tiny_config(folder, folder)
    weights = by_name(nnx.state(task_of(config).make(nnx.Rngs(0))))
    save_trained(Trained(config=config, weights=weights, steps=0, where=""), folder / "model", "a card")
    return folder / "model"


@pytest.fixture(scope="module")
def language_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language")
    config = tiny_config(simulated_rows(folder, 10_000), folder / "runs", steps=10)
    return Path(train(config)["run"])


def test_the_completer_of_the_package_predicts_unmeasured_pairs_of_nodes_it_has_never_seen(shipped: Predictor) -> None:
    known, asked = plane()
    answers = shipped.predict_df(asked.drop_columns(["rtt"]), history=known)
    rtt = asked["rtt"].to_numpy()
    error = np.abs(answers["predictions"].to_numpy() - rtt) / rtt
    of_median = np.abs(np.median(known["rtt"]) - rtt) / rtt
    assert np.median(error) < 0.12
    assert np.median(error) < 0.4 * np.median(of_median)
    inside = (rtt >= answers["0.1"].to_numpy()) & (rtt <= answers["0.9"].to_numpy())
    assert 0.6 < inside.mean() <= 1.0


def test_addresses_make_no_difference_to_the_completer(shipped: Predictor) -> None:
    known, asked = plane()
    asked = asked.slice(0, 8)

    def renumbered(table: pa.Table) -> pa.Table:
        for place in (0, 1):
            texts = [f"2001:db8::{int(text.as_py().rpartition('.')[2]) + 1:x}" for text in table.column(place)]
            table = table.set_column(place, table.column_names[place], pa.array(texts))
        return table

    same = shipped.predict_df(asked, history=known)["predictions"].to_numpy()
    other = shipped.predict_df(renumbered(asked), history=renumbered(known))["predictions"].to_numpy()
    assert np.median(np.abs(np.log(other / same))) < 0.05  # other identities are drawn for them


@pytest.mark.parametrize("kind", ["pandas", "polars", "arrow"])
def test_a_data_frame_comes_back_as_the_kind_it_was_with_its_columns_and_the_answers(
    shipped: Predictor, kind: str
) -> None:
    known, asked = plane()
    asked = asked.slice(0, 8).append_column("note", pa.array(list("abcdefgh")))
    frames: dict[str, Any] = {"arrow": asked, "pandas": asked.to_pandas().set_index(pd.Index(range(10, 18)))}
    if kind == "polars":
        frames["polars"] = pytest.importorskip("polars").from_arrow(asked)
    answer = shipped.predict_df(frames[kind], history=known, quantile_levels=[0.25, 0.75])
    assert type(answer) is type(frames[kind])
    names = list(answer.column_names if kind == "arrow" else answer.columns)
    asked_for = ["src_addr", "dst_addr", "rtt", "note", "p_failed", "predictions", "0.25", "0.75"]
    rests_on = ["measured", "pair_measurements", "src_measurements", "dst_measurements"]
    rests_on += ["chain", "distance_km", "extrapolating", "reason"]
    assert names == asked_for + rests_on
    low, middle, high = (np.asarray(answer[name]) for name in ("0.25", "predictions", "0.75"))
    assert (low < middle).all()
    assert (middle < high).all()
    if kind == "pandas":
        assert list(answer.index) == list(range(10, 18))


def test_distributions_are_those_whose_quantiles_the_data_frame_has(
    shipped: Predictor,
) -> None:
    known, asked = plane()
    asked = asked.slice(0, 8)
    found = shipped.distributions(asked, history=known, progress=True)
    assert isinstance(found, RttDistribution)
    answers = shipped.predict_df(asked.to_pandas(), history=known, quantile_levels=[0.1])
    np.testing.assert_allclose(found.quantile(0.1), answers["0.1"])
    np.testing.assert_allclose(found.p_failed, answers["p_failed"])
    assert repr(found).startswith(f"<BinDistribution of 8: {found.median[0]:.4g} ms (")
    assert repr(found).endswith(", …>")
    assert len(repr(found)) < 250
    assert repr(shipped).startswith("Predictor(completer of the package, ")
    assert len(repr(shipped)) < 120


def test_a_program_is_warned_of_rows_that_were_dropped(shipped: Predictor) -> None:
    known, asked = plane()
    sources = ["10.0.0.300", *known["src_addr"].to_pylist()[1:]]
    known = known.set_column(0, "src_addr", pa.array(sources))
    for call in (shipped.predict_df, shipped.distributions):
        with pytest.warns(DroppedRowsWarning, match="1 bad_src_addr") as warned:
            call(asked.slice(0, 1), history=known)
        assert warned[0].filename == __file__
    with warnings.catch_warnings(action="error"):  # the commands say it in their own way
        shipped.suggest(load_history(known), budget=1)
    with pytest.raises(PingLlmError, match="last must be at least 1; got 0"):
        shipped.anomalies(known, last=0)


def test_an_error_names_the_argument_and_not_the_option_of_the_command(shipped: Predictor) -> None:
    known, asked = plane()
    for history in (known.rename_columns(["src_addr", "x", "rtt"]), known.rename_columns(["x", "dst_addr", "rtt"])):
        with pytest.raises(PingLlmError, match=r'columns=\{"(src|dst)_addr": "NAME"\}'):
            shipped.predict_df(asked, history=history)


def test_without_any_history_the_answer_is_what_training_taught_and_is_unsure(shipped: Predictor) -> None:
    asked = pa.table({"src": ["192.0.2.1"], "dst": ["198.51.100.1"]})
    answer = shipped.predict_df(asked, quantile_levels=[0.05, 0.95])
    assert answer["0.95"][0].as_py() > 5 * answer["0.05"][0].as_py()


def test_nothing_measured_at_or_after_a_question_changes_its_answer(shipped: Predictor) -> None:
    known, asked = plane()
    early = known.append_column("event_time", pa.array(np.arange(len(known)) + 1_700_000_000))
    question = asked.slice(0, 1).append_column("event_time", pa.array([1_700_100_000]))
    late = pa.concat_tables([question] * 20)
    late = late.set_column(2, "rtt", pa.array(np.full(20, 900.0)))
    late = late.set_column(3, "event_time", pa.array(np.arange(20) + 1_700_100_000))
    alone = shipped.predict_df(question, history=early)["predictions"][0].as_py()
    assert shipped.predict_df(question, history=pa.concat_tables([early, late]))["predictions"][0].as_py() == alone
    after = question.set_column(3, "event_time", pa.array([1_700_200_000]))
    assert shipped.predict_df(after, history=pa.concat_tables([early, late]))["predictions"][0].as_py() > 2 * alone


def test_repeated_measurements_of_a_pair_tell_what_it_measures_next(shipped: Predictor) -> None:
    random = np.random.default_rng(0)
    history = pa.table(
        {
            "src": ["192.0.2.1"] * 40,
            "dst": ["198.51.100.1"] * 40,
            "time": np.arange(40) * 60 + 1_700_000_000,
            "rtt": 37 + random.exponential(0.3, 40),
        }
    )
    answer = shipped.predict_df(history.slice(0, 1).drop_columns(["time", "rtt"]), history=history)
    assert answer["predictions"][0].as_py() == pytest.approx(37.2, rel=0.02)
    assert answer["0.9"][0].as_py() < 45


def test_an_answer_says_what_it_rests_on_and_a_guess_between_islands_is_wide(shipped: Predictor) -> None:
    islands = [[f"{net}.{n}" for n in range(1, 8)] for net in ("192.0.2", "198.51.100")]
    pairs = [(one, other) for own in islands for one in own for other in own if one < other]
    known = pa.table([*zip(*pairs, strict=True), np.full(len(pairs), 8.0)], names=["src", "dst", "rtt"])
    asked = pa.table(
        {"src": ["192.0.2.1", "192.0.2.1", "203.0.113.1"], "dst": ["192.0.2.2", "198.51.100.1", "192.0.2.1"]}
    )
    same, across, new = shipped.predict_df(asked, history=known, quantile_levels=[0.05, 0.95]).to_pylist()
    assert (same["pair_measurements"], same["src_measurements"], same["chain"], same["extrapolating"]) == (
        1,
        6,
        1,
        False,
    )
    assert same["reason"] is None
    assert (across["pair_measurements"], across["dst_measurements"], across["chain"]) == (0, 6, None)
    assert across["extrapolating"]
    assert across["reason"] == "no chain of measurements links the two ends"
    assert across["0.95"] > 150, "the other island may be an ocean away"
    assert new["reason"] == "the source was never measured"


@pytest.mark.parametrize(
    ("source", "time", "message"),
    [
        ("10.0.0.300", 0, "question 1: src_addr '10.0.0.300' is neither an address nor a name"),
        ("192.0.2.1", "yesterday", "question 1: yesterday is not a time"),
    ],
)
def test_a_bad_question_is_named(shipped: Predictor, source: str, time: Any, message: str) -> None:
    asked = pa.table({"src": [source], "dst": ["192.0.2.2"], "event_time": [time]})
    with pytest.raises(PingLlmError, match=message):
        shipped.predict_df(asked)


def test_what_is_not_a_data_frame_is_refused(shipped: Predictor) -> None:
    with pytest.raises(PingLlmError, match="not dict"):
        shipped.predict_df({"src": []})
    with pytest.raises(PingLlmError, match="no column 'dst_addr'"):
        shipped.predict_df(pa.table({"src": ["192.0.2.1"]}))


@pytest.mark.slow
def test_both_models_answer_through_the_same_calls(shipped: Predictor, language_run: Path) -> None:
    language = Predictor.from_pretrained(language_run)
    assert isinstance(shipped.model, Completer)
    assert isinstance(language.model, LanguageModel)
    assert shipped.training_measurements() == []
    assert 8_000 < sum(len(measured.observations) for measured in language.training_measurements()) < 10_000
    known, asked = plane()
    for predictor in (shipped, language):
        answers = predictor.predict_df(asked.slice(0, 4), history=known)
        assert np.isfinite(answers["predictions"].to_numpy()).all()
        nodes = tuple(ADDRESSES)
        column = np.array([0, 0])
        observed = Observations(
            source=column, destination=column + 1, time_s=np.array([1e9, 2e9]), rtt_ms=column + 20.0
        )
        questions = Questions(source=column, destination=column + 2, time_s=np.array([np.nan, 1.5e9]))
        answer = predictor.predict(observed, questions, nodes)
        assert isinstance(answer, RttDistribution)
        assert len(answer) == 2


def test_what_only_addresses_can_tell_is_asked_of_a_language_model_only(shipped: Predictor, exported: Path) -> None:
    assert Predictor.from_pretrained(exported).language_model.config.run_name == "tiny"
    with pytest.raises(PingLlmError, match="needs a language model"):
        _ = shipped.language_model


@pytest.mark.slow
def test_an_exported_model_answers_like_its_run(language_run: Path, tmp_path: Path) -> None:
    save_trained(load_trained(language_run), tmp_path / "model", "a card")
    known, asked = plane()
    of_run, of_files = (
        Predictor.from_pretrained(where).predict_df(asked.slice(0, 8), history=known)["p_failed"].to_numpy()
        for where in (language_run, tmp_path / "model")
    )
    np.testing.assert_allclose(of_files, of_run, rtol=0.05)


def test_a_model_that_was_damaged_or_is_incomplete_is_refused(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_trained(load_trained(exported), folder, "a card")
    with pytest.raises(PingLlmError, match="exists already"):
        save_trained(load_trained(exported), folder, "a card")
    file = next(folder.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(PingLlmError, match="checksum"):
        load_trained(folder)
    file.unlink()
    with pytest.raises(PingLlmError, match="missing"):
        load_trained(folder)
    with pytest.raises(PingLlmError, match="holds no trained model"):
        load_trained(tmp_path)


def test_a_stored_configuration_may_be_edited_and_a_mistake_in_it_is_named_by_its_line(tmp_path: Path) -> None:
    for file in SHIPPED.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config, stored = tmp_path / "config.yml", (SHIPPED / "config.yml").read_text()
    index = tmp_path / "model.safetensors.index.json"
    config.unlink()
    index.unlink()
    described = json.loads((SHIPPED / index.name).read_text())
    del described["metadata"]["sha256"][config.name]  # who edits it says that its checksum no longer holds
    index.write_text(json.dumps(described))
    config.write_text(stored.replace("steps: 14000", "steps: 1_4e3"))  # a number to us, text to YAML
    assert load_trained(tmp_path).config == load_trained().config
    config.write_text(stored.replace("steps: 17000", "stepz: 17000"))
    with pytest.raises(PingLlmError, match=r"config\.yml line 4: unknown key 'stepz': did you mean steps"):
        load_trained(tmp_path)


@pytest.mark.slow
def test_a_run_begins_with_the_weights_it_was_told_to(language_run: Path, tmp_path: Path) -> None:
    before = load_trained(language_run)
    config = before.config.replace(
        run_name="second",
        base_output_directory=str(tmp_path),
        load_parameters_path=str(language_run),
        steps=1,
        learning_rate=1e-12,
        average_decay=0.5,
    )
    after = load_trained(train(config)["run"])
    for old, new in zip(_arrays(before.weights), _arrays(after.weights), strict=True):
        np.testing.assert_allclose(new, old, atol=1e-6)
    with pytest.raises(PingLlmError, match=r"another model than this configuration describes: .*48.* there"):
        train(config.replace(run_name="third", base_mlp_dim=64))


def _arrays(weights: Any) -> list[np.ndarray]:
    import jax

    return [np.asarray(leaf) for leaf in jax.tree.leaves(weights)]


def test_the_files_of_the_package_are_small_enough_to_ship_and_say_how_they_were_made() -> None:
    files = list(SHIPPED.iterdir())
    assert sum(file.stat().st_size for file in files) <= 40e6
    assert max(file.stat().st_size for file in files) <= 12e6
    card = (SHIPPED / "README.md").read_text()
    for part in ("ping-llm train --config", "PlanetLab", "configs/completer"):
        assert part in card


# --- the command line


def run(*arguments: str | int | Path) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.slow
def test_the_command_answers_for_a_pair_without_any_training(tmp_path: Path) -> None:
    known, asked = plane()
    csv.write_csv(known, tmp_path / "pings.csv")
    csv.write_csv(asked.slice(0, 3).drop_columns(["rtt"]), tmp_path / "wanted.csv")
    one, other, rtt = (asked[name][0].as_py() for name in ("src_addr", "dst_addr", "rtt"))
    history = ("--history", tmp_path / "pings.csv", "--context", CONTEXT)
    answer = json.loads(run("predict", *history, "--src", one, "--dst", other, "--quantiles", "0.1,0.9", "--json"))
    assert answer["predictions"][0]["predictions"] == pytest.approx(rtt, rel=0.5)
    columns = ["src_addr", "dst_addr", "p_failed", "predictions", "0.1", "0.9"]
    assert list(answer["predictions"][0])[: len(columns)] == columns
    run("predict", *history, "--matrix", "--output", tmp_path / "all.parquet")
    matrix = pd.read_parquet(tmp_path / "all.parquet")
    assert len(matrix) == sum(a != b for a in set(known["src_addr"]) for b in set(known["dst_addr"]))
    shown = run("predict", *history, "--questions", tmp_path / "wanted.csv")
    assert all(text.as_py() in shown for text in asked["dst_addr"][:3])


@pytest.mark.slow
def test_the_other_questions_are_commands_too(language_run: Path, tmp_path: Path) -> None:
    checkpoint = ("--checkpoint", language_run)
    raw = str(language_run.parents[2] / "raw")
    source = pd.concat(map(pd.read_parquet, Path(raw).glob("*.parquet")))["src_addr"].mode()[0]
    found = json.loads(run("destinations", *checkpoint, "--src", source, "--rtt", 20, "--history", raw, "--json"))
    assert len(found["destinations"]) == 10
    found = json.loads(run("complete", *checkpoint, "--src", "192.0.2.1", "--prefix", "193.0.", "--json"))
    assert all(likely["address"].startswith("193.0.") for likely in found["destinations"])
    found = json.loads(run("anomalies", raw, *checkpoint, "--json", "--output", tmp_path / "all.csv"))
    assert found["measurements"] == 10_000
    assert found["anomalies"][0]["bits"] >= found["anomalies"][-1]["bits"] > found["mean_score"]
    assert all(row["low"] <= row["expected"] <= row["high"] for row in found["anomalies"])
    every = pd.read_csv(tmp_path / "all.csv")
    assert len(every) == every["bits"].notna().sum() == 10_000
    assert every["expected"].notna().sum() == len(found["anomalies"]), "it takes long, and is done of those shown only"
    found = json.loads(run("export", language_run, "--output", tmp_path / "model", "--json"))
    assert "README.md" in found["files"]
    assert "from_pretrained" in (tmp_path / "model" / "README.md").read_text()


def test_a_result_out_of_line_has_a_high_anomaly_score(shipped: Predictor) -> None:
    random = np.random.default_rng(0)
    rtt = 37 + random.exponential(0.3, 40)
    rtt[-1] = 90.0
    times = np.arange(40) * 60 + 1_700_000_000
    history = load_history(
        pa.table({"src": ["192.0.2.1"] * 40, "dst": ["198.51.100.1"] * 40, "time": times, "rtt": rtt})
    )
    bits = shipped.anomaly_scores(history, np.arange(30, 40))
    assert bits[-1] > bits[:-1].max() + 4
