"""A server as a process of its own: starting, slow clients, stopping."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("fastapi", reason="ping-llm serve needs the extra `serve`")

from ping_llm.cli.main import app
from ping_llm.core.errors import PingLlmError
from ping_llm.serve.access import Limits
from ping_llm.serve.server import listen
from serving_fixtures import csv, listening, question

ASK = json.dumps({"questions": [question()]}).encode()


def post(port: int, body: bytes = ASK) -> dict[str, object]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/v1/predict", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        found: dict[str, object] = json.load(reply)
    return found


def read_to_the_end(client: socket.socket) -> bytes:
    client.settimeout(10)
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


class TestSlowClients:
    HEAD = b"POST /api/v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

    def test_a_head_that_never_ends_is_given_up_while_others_are_served(self) -> None:
        with listening(Limits(arrival_seconds=0.5)) as server:
            silent, slow = socket.create_connection(server), socket.create_connection(server)
            slow.sendall(self.HEAD)
            assert post(server[1])["predictions"]
            assert read_to_the_end(silent) == b""
            assert read_to_the_end(slow) == b""

    def test_a_body_that_never_comes_gets_408(self) -> None:
        with listening(Limits(arrival_seconds=0.5)) as server, socket.create_connection(server) as slow:
            slow.sendall(self.HEAD + b"Content-Length: 100\r\n\r\n{")
            assert b" 408 " in read_to_the_end(slow).split(b"\r\n")[0]

    def test_a_second_head_on_one_connection_may_not_linger_either(self) -> None:
        with listening(Limits(arrival_seconds=0.5)) as server, socket.create_connection(server) as client:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            client.settimeout(5)
            reply = b""
            while not reply.endswith(b"}"):
                reply += client.recv(65536)
            assert b" 200 " in reply
            time.sleep(0.7)  # an idle connection is kept
            client.sendall(b"GET /healthz HTTP/1.1\r\n")
            assert read_to_the_end(client) == b""


@pytest.mark.parametrize(
    "text", ["GET / HTTP/9.9\r\n\r\n", "\x00\x01\x02\r\n\r\n", "GET /" + "a" * 200_000 + " HTTP/1.1\r\n"]
)
def test_what_is_no_http_is_answered_by_closing(text: str) -> None:
    with listening(Limits(arrival_seconds=1.0)) as server:
        with socket.create_connection(server) as client:
            try:
                client.sendall(text.encode("latin-1"))
                client.settimeout(10)
                reply = client.recv(65536)
            except ConnectionError:
                reply = b""
            assert reply == b"" or reply.split(b" ")[1] in {b"400", b"421"}
        assert post(server[1])["predictions"]


def test_a_port_that_is_taken_is_one_line() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(PingLlmError, match="cannot listen"):
        listen("127.0.0.1", taken.getsockname()[1])


def mistake(*options: str) -> str:
    error = CliRunner().invoke(app, ["serve", *options]).exception
    assert isinstance(error, PingLlmError)
    return str(error)


class TestCommand:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (["--host", "0.0.0.0"], "other machines"),
            (["--token", "x" * 20, "--token-file", "y"], "not both"),
            (["--token-file", "no/such/file"], "cannot read the token file"),
            (["--token", "short"], "at least 16"),
            (["--host", "0.0.0.0", "--open-to-all", "--accept"], "it needs a token"),
            (["--follow", "no/such/file"], "no such file"),
            (["--watch", "no/such/file"], "no/such/file: no such file"),
        ],
    )
    def test_mistakes_are_one_line_before_anything_is_loaded(self, options: list[str], says: str) -> None:
        assert says in mistake(*options)

    def test_an_empty_token_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "token").write_text("\n")
        assert "must be the token" in mistake("--token-file", str(tmp_path / "token"))

    @pytest.mark.slow
    def test_the_completer_of_the_package_answers_from_a_file_until_ctrl_c(self, tmp_path: Path) -> None:
        file = tmp_path / "pings.csv"
        rows = [(1_700_000_000 + n, f"192.0.2.{1 + n % 5}", f"192.0.2.{6 + n % 3}", 20 + n % 5) for n in range(40)]
        file.write_bytes(csv(rows) + b"\n")
        with listen("127.0.0.1", 0) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "ping_llm", "serve", "--port", str(port), "--follow", str(file)]
        with subprocess.Popen([*command, "--refresh", "1"], stderr=subprocess.PIPE, text=True) as process:
            try:
                _wait_for(lambda: "ping_llm_known_measurements 40.0" in _metrics(port), process)
                found = post(port, json.dumps({"questions": [question("192.0.2.1", "192.0.2.6")]}).encode())
                with file.open("a") as more:
                    more.write("1700001000,192.0.2.1,192.0.2.6,700\n")
                _wait_for(lambda: "ping_llm_known_measurements 41.0" in _metrics(port), process)
                pair = '{destination="192.0.2.6",source="192.0.2.1"}'
                _wait_for(lambda: f"ping_llm_anomalies_total{pair} 1.0" in _metrics(port), process)
                process.send_signal(signal.SIGINT)
                _, log = process.communicate(timeout=20)
            finally:
                process.kill()
        assert process.returncode == 0, log
        assert 15 < found["predictions"][0]["median"] < 35  # type: ignore[index]
        assert "POST /api/v1/predict 200" in log
        assert log.rstrip().endswith("stopped")
        assert "Traceback" not in log


def _metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        return str(reply.read(), "utf-8")


def _wait_for(is_so: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        try:
            if is_so():
                return
        except OSError:
            pass  # it is not there yet
        time.sleep(0.1)
    raise AssertionError("the server did not answer as expected")
