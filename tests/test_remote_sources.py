"""Measurements from servers: Prometheus and RIPE Atlas, which stand-ins on this machine play."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner

from atlas_fixtures import ping, written
from format_samples import PROMETHEUS_VECTOR, A
from ping_llm.cli.main import app
from ping_llm.cli.predict import stamps
from ping_llm.core.errors import PingLlmError
from ping_llm.rows.measurement_set import read_observations
from ping_llm.sources import files, remote

Answer = tuple[int, bytes] | tuple[int, bytes, dict[str, str]]
Query = dict[str, str]


class StandIn:
    """A server whose answers are a function of path and query. `asked` are the requests that came."""

    def __init__(self, answer: Callable[[str, Query], Answer]) -> None:
        self.asked: list[tuple[str, Query, dict[str, str]]] = []
        standing_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                standing_in.asked.append((url.path, query, dict(self.headers.items())))
                code, body, *more = answer(url.path, query)
                self.send_response(code)
                for name, value in ({"Content-Length": str(len(body))} | (more[0] if more else {})).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"


@contextmanager
def standing_in(answer: Callable[[str, Query], Answer]) -> Iterator[StandIn]:
    it = StandIn(answer)
    threading.Thread(target=it.server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield it
    finally:
        it.server.shutdown()
        it.server.server_close()


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.refresh()
    monkeypatch.setenv("PING_LLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PING_LLM_STORAGE_WAIT_S", "0.001")


# Prometheus.


def range_answer(path: str, query: Query) -> Answer:
    """A target that answers in a time that tells when it was asked."""
    start, end, step = (float(query[name]) for name in ("start", "end", "step"))
    times = [start + number * step for number in range(int((end - start) // step) + 1)]
    assert len(times) <= 11_000  # Prometheus refuses more
    values = [[at, str(at % 1000 / 1e4)] for at in times]
    metric = {"__name__": "probe_duration_seconds", "instance": A, "site": "192.0.2.10"}
    found = {"resultType": "matrix", "result": [{"metric": metric, "values": values}]}
    return 200, json.dumps({"status": "success", "data": found}).encode()


def test_a_range_query_is_a_history(tmp_path: Path) -> None:
    with standing_in(range_answer) as server:
        source = f"prometheus+http://{server.host}/prom/?query=probe_duration_seconds&start=1714557600&end=1714557720&step=1m"
        known = read_observations([source])
        assert known.nodes == ("192.0.2.10", A)
        assert known.observations.time_s.tolist() == [1714557600.0, 1714557660.0, 1714557720.0]
        assert known.observations.rtt_ms.tolist() == pytest.approx([60.0, 66.0, 72.0])
        files.expand([source])
        ((path, query, _),) = server.asked  # once, although commands look at their input several times
    assert path == "/prom/api/v1/query_range"
    assert query == {"query": "probe_duration_seconds", "start": "1714557600.0", "end": "1714557720.0", "step": "60.0"}


def test_without_options_the_last_day_of_every_exporter_of_pings(tmp_path: Path) -> None:
    with standing_in(range_answer) as server:
        before = time.time()
        known = read_observations([f"prometheus+http://{server.host}"])
        query = server.asked[0][1]
    assert float(query["end"]) - float(query["start"]) == pytest.approx(86_400)
    assert before <= float(query["end"]) <= time.time()
    assert "probe_icmp_duration_seconds" in query["query"]
    assert "smokeping_response_duration_seconds" in query["query"]
    assert len(known.observations) == 1441


def test_a_long_range_is_asked_for_in_parts_that_do_not_overlap() -> None:
    with standing_in(range_answer) as server:
        known = read_observations([f"prometheus+http://{server.host}/?start=1714557600&end=1714582600&step=1"])
        assert len(server.asked) == 3
    assert known.observations.time_s.tolist() == [1714557600.0 + number for number in range(25_001)]


def test_times_of_which_the_server_has_nothing_are_passed_over() -> None:
    nothing = b'{"status":"success","data":{"resultType":"matrix","result":[]}}'
    first_day = 1714557600

    def answer(path: str, query: Query) -> Answer:
        return range_answer(path, query) if float(query["start"]) >= first_day else (200, nothing)

    with standing_in(answer) as server:
        source = f"prometheus+http://{server.host}/?step=1&start={first_day - 20_000}&end="
        assert len(read_observations([f"{source}{first_day + 9}"]).observations) == 10
        with pytest.raises(PingLlmError, match="or the server has nothing of that time"):
            files.expand([f"{source}{first_day - 10}"])


def test_passing_trouble_is_tried_again() -> None:
    trouble: list[Answer] = [
        (503, b"starting"),
        (200, b'{"status":"success","data":'),
        (200, PROMETHEUS_VECTOR.text.encode(), {"Content-Length": "99999"}),  # and the connection breaks
        (429, b"slow down", {"Retry-After": "0.001"}),
    ]
    with standing_in(lambda *_: trouble.pop(0) if trouble else (200, PROMETHEUS_VECTOR.text.encode())) as server:
        known = read_observations([f"prometheus+http://{server.host}/?start=-1h"])
        assert len(server.asked) == 5
    assert known.observations.rtt_ms.tolist() == [15.0]
    assert known.nodes == ("127.0.0.1", A)  # where no label says who pings: the host of the server


def test_a_server_that_is_watched_is_asked_again() -> None:
    with standing_in(range_answer) as server:
        source = f"prometheus+http://{server.host}/?start=-10m"
        before = stamps([source])
        (old,) = files.expand([source])
        assert len(server.asked) == 1
        assert stamps([source]) != before
        assert len(server.asked) == 2
        assert not old.exists()


def test_credentials_are_sent_to_their_server_and_shown_to_nobody() -> None:
    with standing_in(lambda *_: (401, b"Unauthorized")) as server:
        with pytest.raises(PingLlmError, match="HTTP status 401") as refusal:
            files.expand([f"prometheus+http://ann:secret@{server.host}"])
        assert server.asked[0][2]["Authorization"] == "Basic YW5uOnNlY3JldA=="
    assert "secret" not in str(refusal.value)


def test_another_server_is_not_followed() -> None:
    with standing_in(range_answer) as other:
        away = {"Location": f"http://{other.host}/api/v1/query_range"}
        with (
            standing_in(lambda *_: (302, b"", away)) as server,
            pytest.raises(PingLlmError, match=r"it points to http://127\.0\.0\.1.*name that server"),
        ):
            files.expand([f"prometheus+http://ann:secret@{server.host}"])
        assert not other.asked


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("prometheus+http://127.0.0.1:9/", r"http://127\.0\.0\.1:9/: .*refused \(tried 5 times\)"),
        ("prometheus+http://127.0.0.1:x/", "http://127.0.0.1:x/: "),
        ("prometheus+http://127.0.0.1:9/?step=often", "step='often' is no span of time"),
        ("prometheus+http://127.0.0.1:9/?start=yesterday", "'yesterday' is no time such as"),
        ("prometheus+http://127.0.0.1:9/?start=2024-05-02&end=2024-05-01", "start must be before end"),
        ("prometheus+http://127.0.0.1:9/?querry=up", "'querry' is none of end, query, start, step"),
        ("prometheus+http://127.0.0.1:9/?up", "must be NAME=VALUE"),
        ("prometheus+file:///etc/passwd", "is not supported"),
        ("atlas:ping", "write atlas:NUMBER"),
        ("atlas:1001?from=1", "'from' is none of page, probe_ids, start, stop"),
    ],
)
def test_a_wrong_source_is_one_line(source: str, message: str) -> None:
    with pytest.raises(PingLlmError, match=message) as error:
        files.expand([source])
    assert "\n" not in str(error.value)


def test_the_error_of_a_query_is_the_servers_own() -> None:
    said = b'{"status":"error","errorType":"bad_data","error":"1:3: parse error: unexpected end of input"}'
    with (
        standing_in(lambda *_: (400, said)) as server,
        pytest.raises(PingLlmError, match=r"HTTP status 400 '1:3: parse error: unexpected end of input'$"),
    ):
        files.expand([f"prometheus+http://{server.host}/?query=up("])


# RIPE Atlas.

HOUR = 3600
START = 1_714_521_600  # a multiple of six hours


def atlas(about: dict[str, Any] | None = None, every: int = HOUR) -> Callable[[str, Query], Answer]:
    """The API of measurement 1001, with a result each hour, both ends of a range included as in the true one."""

    def answer(path: str, query: Query) -> Answer:
        if path == "/api/v2/measurements/1001/":
            return 200, json.dumps({"id": 1001, "type": "ping", "status": {"id": 2}} | (about or {})).encode()
        if path != "/api/v2/measurements/1001/results/":
            return 404, b'{"error":{"status":404,"code":104,"title":"Not Found","detail":"Not found."}}'
        first, last = int(query["start"]), int(query["stop"])
        results = [ping(timestamp=at) for at in range(-(-first // every) * every, last + 1, every)]
        return 200, json.dumps(results).encode()

    return answer


def pages_asked(server: StandIn) -> list[tuple[int, int]]:
    return [(int(query["start"]), int(query["stop"])) for path, query, _ in server.asked if path.endswith("/results/")]


def test_a_measurement_is_read_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with standing_in(atlas()) as server:
        monkeypatch.setenv("PING_LLM_ATLAS_URL", f"http://{server.host}/api/v2")
        monkeypatch.setenv("PING_LLM_ATLAS_KEY", "k-123")
        known = read_observations([f"atlas:1001?start={START}&stop=2024-05-01T15:00Z&probe_ids=2,5"])
        assert pages_asked(server) == [
            (START, START + 6 * HOUR - 1),
            (START + 6 * HOUR, START + 12 * HOUR - 1),
            (START + 12 * HOUR, START + 15 * HOUR - 1),
        ]
        assert server.asked[-1][1] | {"probe_ids": "2,5", "format": "json"} == server.asked[-1][1]
        assert server.asked[-1][2]["Authorization"] == "Key k-123"
    assert known.observations.time_s.tolist() == [float(START + number * HOUR) for number in range(15)]


def test_the_importer_of_atlas_results_takes_a_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with standing_in(atlas()) as server:
        monkeypatch.setenv("PING_LLM_ATLAS_URL", f"http://{server.host}/api/v2")
        source = f"atlas:1001?start={START}&stop={START + 12 * HOUR}"
        done = CliRunner().invoke(app, ["import", "atlas", source, "--packets", "each", "-o", str(tmp_path / "raw")])
    assert done.exit_code == 0, done.output
    assert len(written(tmp_path / "raw")) == 36


def test_a_download_resumes_and_what_is_there_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, broken = atlas(), True

    def interrupted(path: str, query: Query) -> Answer:
        return (500, b"") if broken and query.get("start") == str(START + 6 * HOUR) else answer(path, query)

    with standing_in(interrupted) as server:
        monkeypatch.setenv("PING_LLM_ATLAS_URL", f"http://{server.host}/api/v2")
        source = f"atlas:1001?start={START}&stop={START + 12 * HOUR}"
        with pytest.raises(PingLlmError, match=r"atlas:1001: HTTP status 500 .*\(tried 5 times\)"):
            files.expand([source])
        broken = False
        server.asked.clear()
        assert len(read_observations([source]).observations) == 12
        assert pages_asked(server) == [(START + 6 * HOUR, START + 12 * HOUR - 1)]
        server.asked.clear()
        remote.refresh()
        longer = files.expand([f"atlas:1001?start={START}&stop={START + 13 * HOUR}"])
        assert pages_asked(server) == [(START + 12 * HOUR, START + 13 * HOUR - 1)]
        assert len(longer) == 3


def test_pages_whose_results_may_still_arrive_are_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with standing_in(atlas(every=60)) as server:
        monkeypatch.setenv("PING_LLM_ATLAS_URL", f"http://{server.host}/api/v2")
        start = int(time.time()) // HOUR * HOUR - 3 * HOUR
        first = files.expand([f"atlas:1001?start={start}&stop=-1s&page=1h"])
        remote.refresh()
        server.asked.clear()
        assert files.expand([f"atlas:1001?start={start}&stop=-1s&page=1h"]) == first
        asked = [page[0] for page in pages_asked(server)]
        assert asked
        assert min(asked) >= start + 2 * HOUR  # what ended more than an hour ago is settled


def test_without_times_the_last_day_of_a_measurement_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with standing_in(atlas({"stop_time": START + 90 * HOUR})) as server:
        monkeypatch.setenv("PING_LLM_ATLAS_URL", f"http://{server.host}/api/v2")
        known = read_observations(["atlas:1001"]).observations
    assert (known.time_s[0], known.time_s[-1]) == (START + 66 * HOUR, START + 89 * HOUR)


@pytest.mark.parametrize(
    ("source", "about", "message"),
    [
        ("atlas:1001", {"type": "traceroute"}, "atlas:1001 is a measurement of 'traceroute': only pings"),
        ("atlas:77", {}, "atlas:77: HTTP status 404 'Not found.'$"),
        (f"atlas:1001?start={START}&stop={START + 60}", {}, "no input file was given, or the server has nothing"),
    ],
)
def test_what_atlas_cannot_give_is_one_line(
    source: str, about: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with standing_in(atlas(about, every=86_400 * 365)) as server:
        monkeypatch.setenv("PING_LLM_ATLAS_URL", f"http://{server.host}/api/v2")
        with pytest.raises(PingLlmError, match=message):
            files.expand([source])
