"""A server for tests: a model that answers at once, measurements of a few nodes, and requests without a network."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn
from starlette.testclient import TestClient

from ping_llm import Predictor
from ping_llm.core.rtt import Observations
from ping_llm.models.completer.inference import BinDistribution, Completer
from ping_llm.models.completer.network import Bins
from ping_llm.rows.measurement_set import MeasurementSet
from ping_llm.serve.access import Limits, ServeSettings
from ping_llm.serve.answers import ModelAnswers
from ping_llm.serve.api import Service
from ping_llm.serve.jobs import ModelThread
from ping_llm.serve.schemas import Place
from ping_llm.serve.server import listen, make_app, server_config
from ping_llm.serve.store import MeasurementStore, read_store
from ping_llm.serve.watch import Watcher, WatchSettings

SOURCE, DESTINATION, OTHER = "192.0.2.1", "192.0.2.2", "192.0.2.3"
NODES = (SOURCE, DESTINATION, OTHER, "198.51.100.7", "2001:db8::1", "2001:db8::2")
BINS = 256
PLACES = [
    Place(address=SOURCE, name="Here", latitude=50.1, longitude=8.7),
    Place(address=DESTINATION, name="There", latitude=-33.9, longitude=151.2),
]


class MedianOfSource(Completer):
    """Instead of a trained model: a peak at the median of what was known of the source, 50 ms if that is nothing."""

    def in_parts(self, known: Observations, questions: Any, nodes: Any = None, advance: Any = None) -> Iterator[Any]:
        centres = Bins(BINS).centres
        for row in range(len(questions)):
            own = known.take((known.source == questions.source[row]) & ~np.isnan(known.rtt_ms))
            own = own.take(~(own.time_s >= questions.time_s[row]))
            peak = np.log(max(np.median(own.rtt_ms), 0.05)) if len(own) else np.log(50.0)
            shape = np.exp(-(((centres - peak) / 0.2) ** 2))
            probability = (shape / shape.sum())[None]
            yield np.array([row]), BinDistribution(p_failed=np.array([0.1]), probability=probability)

    def predict(self, known: Observations, questions: Any, nodes: Any = None, advance: Any = None) -> BinDistribution:
        parts = [answers for _, answers in self.in_parts(known, questions, nodes)]
        names = ("p_failed", "probability")
        return BinDistribution(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def quick_answers(model: type[MedianOfSource] = MedianOfSource) -> ModelAnswers:
    trained: Any = SimpleNamespace(is_completer=True, where="stand-in", steps=7, config=None, weights=None)
    predictor = Predictor(trained=trained)
    vars(predictor)["model"] = model(settings=SimpleNamespace(answer_bins=BINS), weights=None)  # type: ignore[arg-type]
    return ModelAnswers(predictor)


def some_store(times: bool = True) -> MeasurementStore:
    """SOURCE measures 192.0.2.2 (10 ms) and 192.0.2.3 (30 ms) in turn, ten times; once it fails."""
    count = 20
    index = np.arange(count)
    rtt = np.where(index % 2, 30.0, 10.0).astype(np.float32)
    rtt[7] = np.nan
    observations = Observations(
        source=np.zeros(count, np.int64),
        destination=1 + index % 2,
        time_s=np.where(times, 1_700_000_000.0 + 60 * index, np.nan).astype(np.float64),
        rtt_ms=rtt,
    )
    return MeasurementStore(MeasurementSet(nodes=NODES, observations=observations))


@contextmanager
def service(
    answers: ModelAnswers | None = None,
    store: MeasurementStore | None = None,
    limits: Limits | None = None,
    **more: Any,
) -> Iterator[Service]:
    answers, limits = answers or quick_answers(), limits or Limits()
    with ModelThread(answers.forecast, limits.waiting) as thread:
        about = {"warm": True, **more}
        yield Service(model=answers, store=store or read_store([]), thread=thread, limits=limits, **about)


@contextmanager
def running(
    answers: ModelAnswers | None = None,
    store: MeasurementStore | None = None,
    limits: Limits | None = None,
    *,
    warm: bool = True,
    places: Sequence[Place] = (),
    **settings: Any,
) -> Iterator[TestClient]:
    """Requests to a server, as a client on this machine would send them."""
    serving = ServeSettings(limits=limits or Limits(), **settings)
    with (
        service(answers, store, serving.limits, warm=warm, places=places) as shared,
        TestClient(make_app(shared, serving), base_url="http://127.0.0.1:8000") as client,
    ):
        yield client


@contextmanager
def listening(
    limits: Limits | None = None,
    store: MeasurementStore | None = None,
    token: str | None = None,
    watch: WatchSettings | None = None,
    places: Sequence[Place] = (),
) -> Iterator[tuple[str, int]]:
    """A server with a stand-in for the model, at a port of this machine."""
    settings = ServeSettings(limits=limits or Limits(), token=token)
    with (
        service(None, store, settings.limits, places=places) as shared,
        Watcher(shared, watch or WatchSettings()) as watcher,
        listen("127.0.0.1", 0) as listener,
    ):
        if watch is not None:
            watcher.start()
        server = uvicorn.Server(server_config(shared, settings))
        server.config.timeout_graceful_shutdown = 1
        worker = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        worker.start()
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            worker.join(timeout=10)
            assert not worker.is_alive()


def good(reply: Any) -> Any:
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(reply: Any, status: int) -> str:
    """What a reply says is wrong, in one line."""
    assert reply.status_code == status, reply.text
    (message,) = reply.json().values()
    assert list(reply.json()) == ["error"]
    assert isinstance(message, str)
    assert "\n" not in message
    return message


def question(source: str = SOURCE, destination: str = DESTINATION, **more: Any) -> dict[str, Any]:
    return {"src_addr": source, "dst_addr": destination, **more}


def csv(rows: Sequence[tuple[Any, ...]], head: str = "event_time,src_addr,dst_addr,rtt") -> bytes:
    return "\n".join([head, *(",".join(map(str, row)) for row in rows)]).encode()


FILE = {"Content-Type": "application/octet-stream"}
