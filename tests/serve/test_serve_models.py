"""Both real models behind the API: answers equal those of the Python API, and a warm server compiles nothing."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pytest
from flax import nnx

pytest.importorskip("fastapi", reason="ping-llm serve needs the extra `serve`")

from starlette.testclient import TestClient

from ping_llm.config import Config
from ping_llm.core.rtt import Observations
from ping_llm.models.lm import ModelSettings, Transformer
from ping_llm.predict.language_model import LanguageModel
from ping_llm.predict.predictor import Predictor
from ping_llm.rows.measurement_set import MeasurementSet
from ping_llm.serve.answers import ModelAnswers, steady_predictor
from ping_llm.serve.store import MeasurementStore, read_upload
from ping_llm.serve.watch import Watcher, WatchSettings
from serving_fixtures import FILE, csv, good, running, service

LENGTH = 128
SETTINGS = ModelSettings(layers=1, width=16, heads=1, head_dim=16, mlp_width=16, dtype="float32", attention="plain")


@pytest.fixture(scope="module")
def answers() -> ModelAnswers:
    """A language model with weights drawn at random: every token counts."""
    config = Config(max_target_length=LENGTH)
    weights = nnx.state(Transformer(SETTINGS, nnx.Rngs(0)))
    model = LanguageModel(config=config, settings=SETTINGS, weights=weights)
    trained: Any = SimpleNamespace(config=config, is_completer=False, where="random", steps=0)
    predictor = Predictor(trained=trained)
    vars(predictor)["model"] = model
    return ModelAnswers(predictor)


@pytest.fixture(scope="module")
def store() -> MeasurementStore:
    """Ten sources of either family, each of which measures its four destinations for an hour."""
    random = np.random.default_rng(0)
    nodes = [*(f"192.0.2.{n}" for n in range(1, 15)), *(f"2001:db8::{n:x}" for n in range(1, 15))]
    index = np.arange(1200)
    source = index % 10 + 14 * (index // 10 % 2)
    destination = source - source % 14 + 10 + random.integers(0, 4, len(index))
    rtt = random.lognormal(3, 0.5, len(index)).astype(np.float32)
    rtt[random.random(len(index)) < 0.05] = np.nan
    observations = Observations(
        source=source, destination=destination, time_s=(1_700_000_000.0 + 3 * index).astype(np.float64), rtt_ms=rtt
    )
    return MeasurementStore(MeasurementSet(nodes=tuple(nodes), observations=observations))


@pytest.fixture(scope="module")
def client(answers: ModelAnswers, store: MeasurementStore) -> Iterator[TestClient]:
    with running(answers, store) as client:
        yield client


@pytest.fixture
def compiled() -> list[str]:
    """Names of what is compiled from now on."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **more: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(more.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    return names


def pairs(store: MeasurementStore, count: int) -> list[dict[str, str]]:
    """Measured pairs of different sources, of both families."""
    observations, nodes = store.measured.observations, store.measured.nodes
    first = np.unique(observations.source, return_index=True)[1]
    rows = np.concatenate([first, first + 20])[np.linspace(0, 39, count).astype(int)].tolist()
    ends = ((observations.source[row], observations.destination[row]) for row in rows)
    return [{"src_addr": nodes[source], "dst_addr": nodes[destination]} for source, destination in ends]


def table(store: MeasurementStore) -> pa.Table:
    observations, nodes = store.measured.observations, store.measured.nodes
    micros = (observations.time_s * 1e6).round().astype(np.int64)
    return pa.table(
        {
            "event_time": pa.array(micros).cast(pa.timestamp("us", tz="UTC")),
            "src_addr": [nodes[node] for node in observations.source.tolist()],
            "dst_addr": [nodes[node] for node in observations.destination.tolist()],
            "rtt": pa.array(observations.rtt_ms, from_pandas=True),
        }
    )


def test_answers_are_those_of_the_python_api(
    client: TestClient, store: MeasurementStore, answers: ModelAnswers
) -> None:
    questions: list[dict[str, Any]] = [*pairs(store, 6)]
    found = good(client.post("/api/v1/predict", json={"questions": questions, "quantiles": [0.9]}))["predictions"]
    expected = answers.predictor.predict_df(
        pa.Table.from_pylist(questions), history=table(store), quantile_levels=[0.9]
    )
    assert [one["median"] for one in found] == pytest.approx(expected["predictions"].to_pylist(), rel=1e-3)
    assert [one["p_failed"] for one in found] == pytest.approx(expected["p_failed"].to_pylist(), rel=1e-3)
    assert [one["quantiles"]["0.9"] for one in found] == pytest.approx(expected["0.9"].to_pylist(), rel=1e-3)


@pytest.mark.slow
def test_a_warm_server_compiles_nothing_whatever_is_asked(
    client: TestClient, answers: ModelAnswers, store: MeasurementStore, compiled: list[str]
) -> None:
    for _ in answers.warm_up():
        pass
    compiled.clear()
    questions = pairs(store, 40)
    assert {":" in one["src_addr"] for one in questions} == {True, False}
    jax.jit(lambda x: x + len(compiled))(np.zeros(3))
    assert compiled, "what is compiled is noticed"
    compiled.clear()
    for count in (1, 2, 7, 40):
        good(client.post("/api/v1/predict", json={"questions": questions[:count], "bins": 16}))
    for one in (questions[0], questions[-1]):
        source, destination = one["src_addr"], one["dst_addr"]
        shared = {"src_addr": source, "rtt": 20.0}
        good(client.post("/api/v1/context", json={"question": one}))
        good(client.post("/api/v1/rank", json={"src_addr": source, "dst_addrs": [destination]}))
        good(client.post("/api/v1/destinations", json=shared | {"count": 3}))
        good(client.post("/api/v1/destinations", json=shared | {"candidates": [destination]}))
        prefix = "2001:" if ":" in source else "193."
        good(client.post("/api/v1/complete", json=shared | {"prefix": prefix, "count": 2}))
        times = [(1_700_000_000 + n, source, destination, 5 + n) for n in range(30)]
        good(client.post("/api/v1/anomalies/file", content=csv(times), headers=FILE))
    assert compiled == []


def test_the_context_ends_with_the_prediction_itself(client: TestClient, store: MeasurementStore) -> None:
    one = pairs(store, 3)[1]
    steps = good(client.post("/api/v1/context", json={"question": one}))["steps"]
    (whole,) = good(client.post("/api/v1/predict", json={"questions": [one]}))["predictions"]
    assert steps[-1]["median"] == pytest.approx(whole["median"], rel=1e-3)
    assert len({step["median"] for step in steps}) > 1


def test_a_language_model_is_watched_too(answers: ModelAnswers, store: MeasurementStore) -> None:
    with service(answers, store) as shared, Watcher(shared, WatchSettings(max_pairs=3)) as watcher:
        watcher.start()
        end = time.monotonic() + 60
        while "ping_llm_anomaly_score{" not in (text := shared.metrics.text().decode()):
            assert time.monotonic() < end
            time.sleep(0.05)
    assert text.count("ping_llm_expected_timeout_ratio{") == 3
    assert "ping_llm_extrapolating" not in text  # it may have learned what the measurements lack


def test_anomaly_scores_are_those_of_the_python_api(
    client: TestClient, answers: ModelAnswers, store: MeasurementStore
) -> None:
    one = pairs(store, 5)[0]
    rows = [(1_700_000_000 + 60 * n, one["src_addr"], one["dst_addr"], 5 + n % 7) for n in range(600)]
    found = good(client.post("/api/v1/anomalies/file?last=500", content=csv(rows), headers=FILE))
    measured = read_upload(csv(rows), 1000)
    expected = answers.predictor.anomaly_scores(measured)
    assert found["bits"][-1] == pytest.approx(expected[-1], abs=0.6)
    assert np.mean(found["bits"]) == pytest.approx(expected[-500:].mean(), abs=0.1)


@pytest.fixture(scope="module")
def completer(store: MeasurementStore) -> Iterator[TestClient]:
    settings: dict[str, Any] = {"context": 64, "whole": 128, "clusters": 0, "contexts_per_call": 1}
    answers = ModelAnswers(Predictor.from_pretrained(**settings))
    for _ in answers.warm_up():
        pass
    with running(answers, store) as client:
        yield client


def test_the_completer_compiles_nothing_either_and_grows_to_its_own_answer(
    completer: TestClient, store: MeasurementStore, compiled: list[str]
) -> None:
    questions = pairs(store, 3)
    found = good(completer.post("/api/v1/predict", json={"questions": questions}))["predictions"]
    steps = good(completer.post("/api/v1/context", json={"question": questions[0]}))["steps"]
    assert steps[-1]["median"] == pytest.approx(found[0]["median"], rel=1e-3)
    assert len({step["median"] for step in steps}) > 2
    good(
        completer.post("/api/v1/predict", json={"questions": [{"src_addr": "203.0.113.1", "dst_addr": "203.0.113.2"}]})
    )
    assert compiled == []


def test_the_server_answers_as_the_command_line_does(store: MeasurementStore) -> None:
    questions: list[dict[str, Any]] = [*pairs(store, 6)]
    questions[-1]["event_time"] = float(store.measured.observations.time_s[len(store) // 2])
    with running(ModelAnswers(steady_predictor(None, 1024)), store) as client:
        found = good(client.post("/api/v1/predict", json={"questions": questions}))["predictions"]
    asked = pa.Table.from_pylist([{"event_time": None} | one for one in questions])
    expected = Predictor.from_pretrained().predict_df(asked, history=store.measured).to_pylist()
    for one, other in zip(found, expected, strict=True):
        assert one["median"] == pytest.approx(other["predictions"], rel=1e-3)
        assert one["quantiles"]["0.9"] == pytest.approx(other["0.9"], rel=1e-3)
        assert one["p_failed"] == pytest.approx(other["p_failed"], rel=1e-3)
        assert one["support"]["chain"] == other["chain"]
