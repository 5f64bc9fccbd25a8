"""What is watched: measurements that arrive, what was expected of them, and what Prometheus reads of that."""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="ping-llm serve needs the extra `serve`")

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from ping_llm.core.errors import PingLlmError
from ping_llm.rows.measurement_set import MeasurementSet
from ping_llm.serve.access import Limits, ServeSettings
from ping_llm.serve.feeds import Feed, FileTail, PrometheusFeed, feeds_of, from_queue, read_pairs
from ping_llm.serve.server import make_app
from ping_llm.serve.store import MeasurementStore, measurements_of
from ping_llm.serve.watch import Watcher, WatchSettings
from ping_llm.sources.nodes import Node
from serving_fixtures import DESTINATION, NODES, OTHER, SOURCE, good, question, refused, running, service, some_store

Samples = dict[str, float]
TOKEN = "correct-horse-battery-staple"


def key(name: str, destination: str = DESTINATION, **labels: str) -> str:
    return name + str(sorted({"source": SOURCE, "destination": destination, **labels}.items()))


def read(text: str) -> Samples:
    """Every sample by its name and labels. A parser that is not ours, and that refuses what is no exposition."""
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    found = {one.name + (str(sorted(one.labels.items())) if one.labels else ""): one.value for one in samples}
    assert len(found) == len(samples), "a sample that is there twice"
    return {name.removeprefix("ping_llm_"): value for name, value in found.items()}


class Watched:
    """A server whose measurements arrive when the test says so."""

    def __init__(self, client: TestClient) -> None:
        self.client, self.arrivals, self._asked = client, Queue[MeasurementSet](), threading.Semaphore(0)

    def feed(self) -> MeasurementSet | None:
        self._asked.release()
        return from_queue(self.arrivals)()

    def scrape(self) -> Samples:
        reply = self.client.get("/metrics")
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/plain")
        return read(reply.text)

    def wait(self, is_there: Callable[[Samples], bool]) -> Samples:
        end = time.monotonic() + 20
        while not is_there(found := self.scrape()):
            assert time.monotonic() < end, found
            self._asked.acquire(timeout=1)
        return found

    def arrive(self, *measurements: dict[str, Any]) -> None:
        self.arrivals.put(measurements_of(measurements))


@contextmanager
def watched(store: MeasurementStore | None, feeds: dict[str, Feed] | None = None, **settings: Any) -> Iterator[Watched]:
    with service(store=store) as shared:
        visitor = Watched(TestClient(make_app(shared, ServeSettings()), base_url="http://127.0.0.1:8000"))
        given = {"refresh_seconds": 0.02, **settings}
        with Watcher(shared, WatchSettings(feeds=feeds or {"test": visitor.feed}, **given)) as watcher:
            watcher.start()
            yield visitor


def now(rtt: float | None, destination: str = DESTINATION, second: int = 0) -> dict[str, Any]:
    return question(destination=destination, rtt=rtt, event_time=1_700_100_000 + second)


class TestExpectations:
    def test_every_pair_has_its_expectation_its_latest_result_and_what_that_rests_on(self) -> None:
        with watched(some_store()) as server:
            found = server.wait(lambda samples: samples["watched_pairs"] == 2)
        levels = [found[key("expected_rtt_seconds", level=level)] for level in ("0.05", "0.1", "0.5", "0.9", "0.95")]
        assert levels == sorted(levels)
        assert levels[2] == pytest.approx(0.010, rel=0.02)
        assert found[key("expected_timeout_ratio")] == pytest.approx(0.1)
        assert found[key("observed_rtt_seconds")] == pytest.approx(0.010)
        assert found[key("observed_timeout")] == 0
        assert found[key("observed_timestamp_seconds")] == 1_700_000_000 + 60 * 18
        assert found[key("support_measurements", of="pair")] == 10
        assert found[key("support_measurements", of="source")] == 20
        assert found[key("support_chain_hops")] == 1
        assert found[key("extrapolating")] == 0
        assert found[key("observations_total")] == 0
        assert found["known_measurements"] == 20

    def test_the_latest_result_at_the_start_is_scored_by_what_was_known_without_it(self) -> None:
        rows = [question(rtt=10.0 if n != 19 else 500.0, event_time=1_700_000_000 + n) for n in range(20)]
        with watched(MeasurementStore(measurements_of(rows))) as server:
            found = server.wait(lambda samples: key("anomaly_score") in samples)
        assert found[key("anomaly_score")] > found[key("usual_anomaly_score")] + 15

    def test_what_arrives_is_scored_before_it_counts_and_then_counts(self) -> None:
        with watched(some_store()) as server:
            server.wait(lambda samples: samples["watched_pairs"] == 2)
            server.arrive(now(10.0))
            usual = server.wait(lambda samples: samples[key("observations_total")] == 1)
            server.arrive(now(400.0, second=1))
            odd = server.wait(lambda samples: samples[key("observations_total")] == 2)
            server.arrive(now(None, second=2), now(10.0, OTHER, second=3))
            lost = server.wait(lambda samples: samples[key("observations_total")] == 3)
        assert usual[key("anomaly_score")] < usual[key("usual_anomaly_score")] + 2
        assert usual[key("anomalies_total")] == 0
        assert odd[key("anomaly_score")] > odd[key("usual_anomaly_score")] + 10
        assert odd[key("anomalies_total")] == 1
        assert odd["known_measurements"] == 22
        assert odd[key("support_measurements", of="pair")] == 12
        assert lost[key("observed_timeout")] == 1
        assert key("observed_rtt_seconds") not in lost
        assert lost[key("observed_rtt_seconds", OTHER)] == pytest.approx(0.010)
        assert lost[key("anomaly_score")] == pytest.approx(-math.log2(0.1))

    def test_a_measurement_of_an_address_is_one_of_its_name_in_the_nodes_file(self) -> None:
        described = {"here": Node(name="here", address=SOURCE)}
        nodes = tuple("here" if node == SOURCE else node for node in NODES)
        store = MeasurementStore(replace(some_store().measured, nodes=nodes, described=described))
        with watched(store, pairs=((SOURCE, DESTINATION),)) as server:
            server.wait(lambda samples: samples["watched_pairs"] == 1)
            server.arrive(now(400.0))
            counted = key("observations_total").replace(SOURCE, "here")
            found = server.wait(lambda samples: samples.get(counted) == 1)
        assert found["known_measurements"] == 21
        named = {name.replace("here", SOURCE): value for name, value in found.items()}
        assert named[key("observations_total")] == 1
        assert named[key("anomalies_total")] == 1
        assert named[key("observed_rtt_seconds")] == pytest.approx(0.4)

    def test_one_that_comes_late_counts_but_is_not_the_latest(self) -> None:
        with watched(some_store()) as server:
            server.wait(lambda samples: samples["watched_pairs"] == 2)
            server.arrive(question(rtt=99.0, event_time=1_600_000_000))
            found = server.wait(lambda samples: samples[key("observations_total")] == 1)
        assert found[key("observed_rtt_seconds")] == pytest.approx(0.010)

    def test_a_server_that_begins_with_nothing_learns_its_pairs(self) -> None:
        with watched(None) as server:
            server.arrive(now(30.0), now(31.0, second=1))
            found = server.wait(lambda samples: key("expected_rtt_seconds", level="0.5") in samples)
            assert found[key("expected_rtt_seconds", level="0.5")] == pytest.approx(0.030, rel=0.05)
            server.arrive(now(80.0, OTHER, 2))
            found = server.wait(lambda samples: samples["watched_pairs"] == 2)
        assert found[key("observed_rtt_seconds", OTHER)] == pytest.approx(0.080)
        assert key("anomaly_score", OTHER) not in found  # nothing had been expected of it

    def test_pairs_beyond_the_limit_are_counted_and_the_most_measured_are_there(self) -> None:
        with watched(some_store(), max_pairs=1) as server:
            server.arrive(*(now(9.0, f"198.51.100.{n}", n) for n in range(50)))
            found = server.wait(lambda samples: samples["known_measurements"] == 70)
            found = server.wait(lambda samples: samples["pairs_over_limit"] == 51)
        assert found["watched_pairs"] == 1
        assert sum(name.startswith("anomaly_score") for name in found) == 1

    def test_named_pairs_are_watched_even_if_they_were_never_measured(self, tmp_path: Path) -> None:
        (tmp_path / "pairs.csv").write_text(f"src_addr,dst_addr\n{SOURCE},203.0.113.9\n{SOURCE},203.0.113.9\n")
        with watched(some_store(), pairs=read_pairs(tmp_path / "pairs.csv")) as server:
            found = server.wait(lambda samples: samples["watched_pairs"] == 1)
        assert found[key("extrapolating", "203.0.113.9")] == 1
        assert key("anomaly_score", "203.0.113.9") not in found

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("src_addr,dst_addr\n", "no pair"),
            ("src\n1\n", "dst_addr"),
            ("src_addr,dst_addr\n10.0.0,y\n", "neither an address"),
            (f"src_addr,dst_addr\n{SOURCE},2001:db8::1\n", "family"),
        ],
    )
    def test_a_file_without_pairs_is_one_line(self, tmp_path: Path, text: str, says: str) -> None:
        (tmp_path / "pairs.csv").write_text(text)
        with pytest.raises(PingLlmError, match=says):
            read_pairs(tmp_path / "pairs.csv")

    @pytest.mark.parametrize("kind", [PingLlmError, RuntimeError])
    def test_a_feed_that_fails_is_counted_and_the_others_go_on(self, kind: type[Exception]) -> None:
        def broken() -> MeasurementSet | None:
            raise kind("no such host")

        arrivals = Queue[MeasurementSet]()
        with watched(some_store(), feeds={"queue": from_queue(arrivals), "broken": broken}) as server:
            arrivals.put(measurements_of([now(10.0)]))
            found = server.wait(lambda samples: samples["known_measurements"] == 21)
        assert found["feed_errors_total[('feed', 'broken')]"] >= 1
        assert found["feed_measurements_total[('feed', 'queue')]"] == 1

    def test_only_the_latest_are_kept(self) -> None:
        with watched(some_store(), max_known=25) as server:
            server.arrive(*(now(10.0, second=n) for n in range(20)))
            server.wait(lambda samples: samples["known_measurements"] == 25)


class TestFileTail:
    HEAD = b"event_time,src_addr,dst_addr,rtt\n"

    @staticmethod
    def line(second: int, rtt: Any = 5) -> bytes:
        return f"{1_700_000_000 + second},{SOURCE},{DESTINATION},{rtt}\n".encode()

    @staticmethod
    def add(path: Path, content: bytes) -> None:
        with path.open("ab") as file:
            file.write(content)

    def test_only_whole_new_lines_are_given(self, tmp_path: Path) -> None:
        path = tmp_path / "pings.csv"
        path.write_bytes(self.HEAD + self.line(0, 1) + self.line(1, 2) + b"17000")
        tail = FileTail(path)
        first = tail()
        assert first is not None
        assert first.observations.rtt_ms.tolist() == [1, 2]
        assert tail() is None
        self.add(path, self.line(2, 3).removeprefix(b"17000"))
        second = tail()
        assert second is not None
        assert second.observations.rtt_ms.tolist() == [3]

    def test_json_lines_need_no_head(self, tmp_path: Path) -> None:
        path = tmp_path / "pings.jsonl"
        path.write_bytes(b'{"src_addr": "192.0.2.1", "dst_addr": "192.0.2.2", "rtt": 5}\n')
        tail = FileTail(path)
        found = tail()
        assert found is not None
        self.add(path, b'{"src_addr": "192.0.2.1", "dst_addr": "192.0.2.2", "rtt": null}\n')
        found = tail()
        assert found is not None
        assert len(found.observations) == 1

    @pytest.mark.parametrize("replaced", [True, False])
    def test_a_file_that_was_rotated_or_cut_is_read_from_its_beginning(self, tmp_path: Path, replaced: bool) -> None:
        path = tmp_path / "pings.csv"
        path.write_bytes(self.HEAD + self.line(0) * 20)
        tail = FileTail(path)
        assert tail() is not None
        if replaced:
            path.rename(tmp_path / "pings.csv.1")
            with pytest.raises(PingLlmError, match="cannot read"):
                tail()
        path.write_bytes(self.HEAD + self.line(9, 77))
        found = tail()
        assert found is not None
        assert found.observations.rtt_ms.tolist() == [77]

    @pytest.mark.parametrize("broken", [b"\xff\xfe\x00,,\n", b"not,a\n", b"x,y,z,1\n", b"\n", b'"\n'])
    def test_a_broken_line_costs_no_other(self, tmp_path: Path, broken: bytes) -> None:
        path = tmp_path / "pings.csv"
        lines = [self.line(n, n + 1) for n in range(40)]
        path.write_bytes(self.HEAD + b"".join(lines[:20]) + broken + b"".join(lines[20:]))
        found = FileTail(path)()
        assert found is not None
        assert found.observations.rtt_ms.tolist() == list(range(1, 41))

    def test_nothing_but_rubbish_ends_in_time_and_in_one_line(self, tmp_path: Path) -> None:
        path = tmp_path / "pings.csv"
        path.write_bytes(self.HEAD + os.urandom(3_000_000).replace(b",", b"\n"))
        tail = FileTail(path)
        with pytest.raises(PingLlmError, match="can be read"):
            tail()
        self.add(path, b"\n" + self.line(1))
        assert tail() is not None

    def test_a_line_that_never_ends_is_passed_over(self, tmp_path: Path) -> None:
        path = tmp_path / "pings.csv"
        path.write_bytes(self.HEAD + b"x" * 5_000)
        tail = FileTail(path, max_bytes=1_000)
        assert tail() is None  # the head
        for _ in range(5):
            with pytest.raises(PingLlmError, match="more than 1,000 bytes"):
                tail()
        self.add(path, b"\n" + self.line(1))
        assert tail() is not None

    def test_a_long_file_comes_in_pieces(self, tmp_path: Path) -> None:
        path = tmp_path / "pings.csv"
        path.write_bytes(self.HEAD + b"".join(self.line(n) for n in range(500)))
        tail, found = FileTail(path, max_bytes=1_000), 0
        while (part := tail()) is not None or not found:
            found += len(part.observations) if part else 0
        assert found == 500


class TestPrometheusFeed:
    """`probe_duration_seconds` of one pair, a sample per minute, until now."""

    @staticmethod
    @contextmanager
    def standing_in(now: list[float]) -> Iterator[str]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                query = {
                    name: float(of[0]) for name, of in parse_qs(urlsplit(self.path).query).items() if name != "query"
                }
                times = np.arange(query["start"], min(query["end"], now[0]) + 1e-6, query["step"])
                metric = {"__name__": "probe_duration_seconds", "instance": DESTINATION, "site": SOURCE}
                found = [{"metric": metric, "values": [[at, "0.02"] for at in times]}] if len(times) else []
                body = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": found}}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"prometheus+http://name:word@127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()

    def test_every_sample_comes_once_and_the_last_day_at_first(self) -> None:
        begin = time.time()
        now = [begin - 3600]
        with self.standing_in(now) as url:
            ((name, feed),) = feeds_of([url]).items()
            assert "word" not in name
            first = feed()
            assert first is not None
            assert first.nodes == (SOURCE, DESTINATION)
            assert len(first.observations) == pytest.approx(23 * 60, abs=2)
            assert feed() is None
            now[0] += 150
            second = feed()
            assert second is not None
            since = second.observations.time_s - first.observations.time_s[-1]
            assert since.tolist() == pytest.approx([60.0, 120.0, 180.0][: len(since)], abs=0.01)
            assert len(since) >= 2

    def test_a_server_that_is_gone_is_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PING_LLM_STORAGE_WAIT_S", "0.001")
        with self.standing_in([0.0]) as url:
            pass
        with pytest.raises(PingLlmError) as error:
            PrometheusFeed(url)()
        assert "word" not in str(error.value)


class TestAdding:
    def test_without_accept_nothing_is_taken(self) -> None:
        with running() as client:
            body = {"measurements": [question(rtt=1.0)]}
            assert "--accept" in refused(client.post("/api/v1/measurements", json=body), 403)

    @pytest.mark.parametrize(
        ("one", "says"),
        [
            (question("10.0.0", rtt=1.0), "cannot be used"),
            (question(rtt="fast"), "rtt"),
            (question(rtt=1.0, event_time=4e9), "future"),
            (question(rtt=1.0, colour="red"), "colour"),
        ],
    )
    def test_one_wrong_measurement_keeps_all_out(self, one: dict[str, Any], says: str) -> None:
        arrivals = Queue[MeasurementSet](4)
        with accepting(arrivals) as client:
            body = {"measurements": [question(rtt=1.0, event_time=1_700_000_000), {"event_time": 1_700_000_000} | one]}
            assert says in refused(client.post("/api/v1/measurements", json=body), 422)
        assert arrivals.empty()

    def test_more_than_can_wait_is_busy(self) -> None:
        arrivals = Queue[MeasurementSet](1)
        with accepting(arrivals) as client:
            body = {"measurements": [question(rtt=1.0)]}
            assert good(client.post("/api/v1/measurements", json=body)) == {"added": 1}
            assert "wait" in refused(client.post("/api/v1/measurements", json=body), 503)
            many = {"measurements": [question(rtt=1.0)] * 11}
            refused(client.post("/api/v1/measurements", json=many), 413)


@contextmanager
def accepting(arrivals: Queue[MeasurementSet]) -> Iterator[TestClient]:
    limits = Limits(history=10)
    with service(limits=limits, arrivals=arrivals) as shared:
        yield TestClient(make_app(shared, ServeSettings(limits=limits)), base_url="http://127.0.0.1:8000")


class TestServer:
    def test_requests_are_counted_by_route_whatever_is_asked_for(self) -> None:
        with running(store=some_store()) as client:
            good(client.post("/api/v1/predict", json={"questions": [question()]}))
            refused(client.post("/api/v1/predict", json={}), 422)
            for number in range(30):
                client.get(f"/no/such/{number}")
                client.request(f"VERB{number}", "/healthz")
            found = read(client.get("/metrics").text)
        requests = {name: value for name, value in found.items() if name.startswith("http_requests_total")}
        predicted = "http_requests_total[('method', 'POST'), ('route', '/api/v1/predict'), ('status', '{}')]"
        assert requests[predicted.format(200)] == 1
        assert requests[predicted.format(422)] == 1
        assert len(requests) < 8
        assert found["http_request_duration_seconds_count[('route', '/api/v1/predict')]"] == 2
        assert found["process_resident_memory_bytes"] > 0

    def test_a_server_with_a_token_shows_its_metrics_to_those_who_have_it(self) -> None:
        with running(store=some_store(), token=TOKEN) as client:
            assert client.get("/metrics").status_code == 401
            assert client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
            assert client.get("/metrics", headers={"Host": "evil.example"}).status_code == 401
        with running(store=some_store()) as client:
            assert client.get("/metrics", headers={"Host": "evil.example"}).status_code == 421
