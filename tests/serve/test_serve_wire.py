"""What arrives over a connection, byte for byte: bodies that are too large, pipelined requests, and fuzzed ones."""

import json
import random
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

pytest.importorskip("fastapi", reason="ping-llm serve needs the extra `serve`")

from ping_llm.serve.access import Limits
from serving_fixtures import listening, question, quick_answers, refused, running, some_store

HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
PREDICT = b"POST /api/v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LARGE = 50_000_000
ASK = {"questions": [question()], "history": [question(rtt=10.0, event_time=1_700_000_000)]}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    with listening(Limits(body_bytes=100_000), some_store()) as server:
        yield server


def replies(client: socket.socket, count: int) -> list[int]:
    """Statuses of so many replies."""
    client.settimeout(30)
    file, found = client.makefile("rb"), []
    for _ in range(count):
        found.append(int(file.readline().split()[1]))
        length = 0
        while (line := file.readline().strip().lower()) != b"":
            length = int(line.split()[1]) if line.startswith(b"content-length") else length
        file.read(length)
    return found


class TestLargeBodies:
    @pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
    @pytest.mark.parametrize("chunked", [False, True])
    def test_get_413_and_no_reset(self, server: tuple[str, int], more: bytes, chunked: bool) -> None:
        size = b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"Content-Length: %d\r\n\r\n" % LARGE
        part = b"x" * 1_000_000
        with socket.create_connection(server) as client:
            client.sendall(PREDICT + more + size)
            for _ in range(LARGE // len(part)):
                client.sendall(b"%x\r\n%s\r\n" % (len(part), part) if chunked else part)
            client.sendall(b"0\r\n\r\n" if chunked else b"")
            assert replies(client, 1) == [413]

    def test_are_read_to_the_end_when_refused_for_another_reason(self, server: tuple[str, int]) -> None:
        head = b"POST /api/v1/predict HTTP/1.1\r\nHost: elsewhere\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        with socket.create_connection(server) as client:
            client.sendall(head % LARGE + b"x" * LARGE)
            assert replies(client, 1) == [421]

    def test_are_not_invited(self, server: tuple[str, int]) -> None:
        with socket.create_connection(server) as client:
            client.sendall(PREDICT + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % LARGE)
            assert replies(client, 1) == [413]
            assert client.recv(1) == b""

    def test_that_stop_arriving_get_413_as_well(self) -> None:
        with (
            listening(Limits(body_bytes=1000, arrival_seconds=0.3)) as server,
            socket.create_connection(server) as client,
        ):
            client.sendall(PREDICT + b"Content-Length: 2000\r\n\r\n" + b"x" * 1500)
            assert replies(client, 1) == [413]

    def test_leave_the_connection_usable(self, server: tuple[str, int]) -> None:
        connection = HTTPConnection(*server)
        for body, status in ((b"x" * 200_000, 413), (json.dumps(ASK).encode(), 200)):
            connection.request("POST", "/api/v1/predict", body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            reply.read()
            assert reply.status == status
        connection.close()


class TestPipelining:
    def test_requests_are_answered_in_their_order(self, server: tuple[str, int]) -> None:
        with socket.create_connection(server) as client:
            client.sendall((HEALTH + HEALTH.replace(b"healthz", b"nothing")) * 10)
            assert replies(client, 20) == [200, 404] * 10

    def test_of_many_connections_stops_nobody_else(self) -> None:
        document = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with listening(Limits(pipelined_seconds=1000)) as server:
            clients = [socket.create_connection(server) for _ in range(20)]
            for client in clients:
                client.sendall(document * 100)
            assert [replies(client, 1) for client in clients] == [[200]] * 20  # the others of each have to wait
            with socket.create_connection(server) as other:
                other.sendall(HEALTH)
                assert replies(other, 1) == [200]
            for client in clients:
                client.close()


def test_while_the_model_warms_up_a_late_answer_says_when_to_ask_again() -> None:
    done = threading.Event()

    class Stuck(type(quick_answers().model)):  # type: ignore[misc]
        def in_parts(self, *_: object, **__: object) -> Iterator[object]:
            done.wait(30)
            yield from ()

    with running(quick_answers(Stuck), limits=Limits(seconds=0.1), warm=False) as client:
        reply = client.post("/api/v1/predict", json=ASK)
        done.set()
    assert "warming up" in refused(reply, 503)
    assert reply.headers["Retry-After"] == "10"


@pytest.mark.parametrize(
    "host",
    ["localhost:80@evil.example", "localhost@evil.example", "localhost:", "localhost:80:80", "localhost:evil",
     "localhost/evil", "[::1]evil", "[::1].evil.example", "[::1", "127.0.0.1#evil", "localhost evil"],
)  # fmt: skip
def test_only_a_well_formed_host_is_known(server: tuple[str, int], host: str) -> None:
    with socket.create_connection(server) as client:
        client.sendall(f"GET /api/v1/model HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert replies(client, 1) == [421]


# Fuzzed requests: every one gets an answer that is no 500.

METHODS = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "get", "X"]
NAMES = [
    "model",
    "predict",
    "rank",
    "context",
    "destinations",
    "complete",
    "anomalies",
    "anomalies/file",
    "measurements",
]
PATHS = [f"/api/v1/{name}" for name in (*NAMES, "measurements", "addresses", "history", "../model")] + [
    "/", "/docs", "/healthz", "/openapi.json", "/static/main.js", "/static/%2e%2e/x", "/%ff%fe", "/%00", "//", "*",
    "http://evil.example/",
]  # fmt: skip
HEADERS = [b"Content-Type: application/json", b"Content-Type: application/octet-stream", b"Content-Type: \xff/\xfe",
           b"Host: evil", b"Authorization: Bearer \xff", b"Range: bytes=9999999-1,0-", b"If-None-Match: \xff",
           b"If-Modified-Since: never", b"Upgrade: websocket\r\nConnection: Upgrade", b"Expect: 100-continue",
           b"Accept-Encoding: \x80", b"Cookie: a", b"Transfer-Encoding: gzip", b"Content-Length: 3",
           b"X-\xff: 1"]  # fmt: skip
VALUES: list[object] = [None, True, -1, 0, 1e308, 10**30, "", "x" * 70, "192.0.2.1", "2001:db8::1", "\ud800", "\x00",
                        [], [[]], {}, "nan", 1_700_000_000, "2024-05-01T00:00:00Z", 0.5]  # fmt: skip
BODY = {
    "questions": [question()], "question": question(), "history": [question(rtt=1.0)], "use_rows": False, "bins": 8,
    "quantiles": [0.5], "sizes": [1], "src_addr": "192.0.2.1", "dst_addrs": ["192.0.2.2"], "event_time": 1, "rtt": 20.0,
    "count": 3, "candidates": ["192.0.2.2"], "prefix": "192.", "measurements": [question(rtt=1.0)], "last": 1,
}  # fmt: skip
KEYS = {
    "predict": ["questions", "history", "use_rows", "bins", "quantiles"],
    "context": ["question", "sizes", "history", "bins"],
    "rank": ["src_addr", "dst_addrs", "event_time", "quantiles", "history"],
    "destinations": ["src_addr", "rtt", "event_time", "count", "candidates", "history"],
    "complete": ["src_addr", "prefix", "rtt", "count"],
    "anomalies": ["measurements", "last"],
}


def mutated(value: object, rng: random.Random) -> object:
    """The value with about one of its parts replaced."""
    if rng.random() < 0.3 or not isinstance(value, dict | list) or not value:
        return rng.choice(VALUES)
    changed = value.copy()
    key = rng.choice(list(changed) if isinstance(changed, dict) else range(len(changed)))
    changed[key] = mutated(changed[key], rng)
    return changed


def test_fuzzed_bodies_are_answered_or_refused_in_one_line() -> None:
    rng = random.Random(18)
    with running(store=some_store()) as client:
        for _ in range(600):
            name = rng.choice(list(KEYS))
            body = json.dumps(mutated({key: BODY[key] for key in KEYS[name]}, rng))
            reply = client.post(f"/api/v1/{name}", content=body, headers={"Content-Type": "application/json"})
            assert reply.status_code in {200, 413, 422}, (name, body, reply.text)
            if reply.status_code != 200:
                refused(reply, reply.status_code)


def test_fuzzed_requests_get_an_answer_and_never_a_reset() -> None:
    rng = random.Random(18)
    with listening(Limits(arrival_seconds=0.2), some_store()) as server:
        for _ in range(300):
            body = rng.choice([b"", b"{}", b"\xff" * 20, json.dumps(ASK).encode()])
            lines = [f"{rng.choice(METHODS)} {rng.choice(PATHS)} HTTP/1.1".encode(), *rng.sample(HEADERS, 2)]
            lines += [b"Host: localhost"] * rng.choice([0, 1, 1, 1]) + [b"Content-Length: %d" % len(body)]
            head = bytearray(b"\r\n".join(lines) + b"\r\n\r\n")
            if rng.random() < 0.3:
                head[rng.randrange(len(head))] = rng.randrange(256)
            with socket.create_connection(server) as client:
                client.sendall(bytes(head) + body)
                client.shutdown(socket.SHUT_WR)
                client.settimeout(30)
                reply = b""
                while part := client.recv(65536):
                    reply += part
            assert reply == b"" or reply.startswith(b"HTTP/1.1 "), bytes(head)
            assert b"HTTP/1.1 500" not in reply, bytes(head)
        with socket.create_connection(server) as client:
            client.sendall(HEALTH)
            assert replies(client, 1) == [200]
