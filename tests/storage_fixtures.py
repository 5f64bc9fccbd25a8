"""A real S3 protocol server on this machine (moto's), which can be told to misbehave."""

import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from werkzeug.serving import WSGIRequestHandler, make_server

from ping_llm.storage import Location, locate
from ping_llm.storage.stores import file_system

Environ = dict[str, Any]
Application = Callable[[Environ, Any], Any]
Fault = Callable[[Environ, Any, Application], Any]

BUCKET = "measurements"


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:
        """Nothing: a test prints only what it found."""


class S3Server:
    """`faults` are asked in turn what to do with a request; the first that answers is used up."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self._inner: Application = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self.requests: list[tuple[str, str]] = []
        self.most_at_once = 0
        self._under_way = 0
        self._faults: list[tuple[str, str, Fault, float]] = []
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def fail(self, fault: Fault, *, times: float = 1, method: str = "", key: str = "") -> None:
        """Answer the next `times` requests of a method and a part of a path with a fault."""
        self._faults.append((method, key, fault, times))

    def heal(self) -> None:
        self._faults.clear()
        self.requests.clear()
        self.most_at_once = 0

    def count(self, method: str, key: str = "") -> int:
        return sum(m == method and key in path for m, path in self.requests)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, environ: Environ, start: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        with self._lock:
            self.requests.append((method, path))
            fault = self._next_fault(method, path)
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
        try:
            return fault(environ, start, self._inner) if fault else self._inner(environ, start)
        finally:
            with self._lock:
                self._under_way -= 1

    def _next_fault(self, method: str, path: str) -> Fault | None:
        for number, (wanted, key, fault, times) in enumerate(self._faults):
            if wanted in ("", method) and key in path and times > 0:
                self._faults[number] = (wanted, key, fault, times - 1)
                return fault
        return None


def status(code: int) -> Fault:
    def answer(environ: Environ, start: Any, inner: Application) -> Any:
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start(f"{code} Fault", [("Content-Length", "0"), ("Content-Type", "application/xml")])
        return [b""]

    return answer


def truncated(environ: Environ, start: Any, inner: Application) -> Any:
    """Announce the whole body, send half of it and hang up."""
    said: list[Any] = []
    body = b"".join(inner(environ, lambda code, headers, info=None: said.extend([code, headers])))
    start(*said)
    return [body[: len(body) // 2]]


def slow(seconds: float) -> Fault:
    def answer(environ: Environ, start: Any, inner: Application) -> Any:
        time.sleep(seconds)
        return inner(environ, start)

    return answer


@contextmanager
def running_server() -> Iterator[S3Server]:
    kept = dict(os.environ)
    server = S3Server()
    os.environ |= {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    file_system.cache_clear()
    try:
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/{BUCKET}", method="PUT")).close()
        yield server
    finally:
        server.stop()
        os.environ.clear()
        os.environ.update(kept)
        file_system.cache_clear()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    with running_server() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[S3Server]:
    """The server in good health, with short retries and a cache of the test's own."""
    s3_server.heal()
    monkeypatch.setenv("PING_LLM_STORAGE_TRIES", "4")
    monkeypatch.setenv("PING_LLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PING_LLM_CACHE_GB", "1")
    monkeypatch.setenv("PING_LLM_STORAGE_WAIT_S", "0.005")
    yield s3_server
    s3_server.heal()


@pytest.fixture
def bucket(s3: S3Server, request: pytest.FixtureRequest) -> Location:
    """A folder of the test's own in the bucket."""
    return locate(f"s3://{BUCKET}/{abs(hash(request.node.nodeid))}")


def run_python(script: str, *arguments: object) -> "subprocess.Popen[str]":
    """Another process that runs a few lines."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
