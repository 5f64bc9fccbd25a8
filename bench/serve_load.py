"""Load on `ping-llm serve`: how soon a fresh server answers, how quick a warm one is, and what many clients get.

    python bench/serve_load.py --rows data/demo/rows-500000 --checkpoint runs/ping-llm/demo --seconds 60

The server is a process of its own on this machine, started twice: with nothing compiled, and with what that start has
left behind. Clients ask for single predictions of random measured pairs, one after the other, each on a connection that
it keeps.
"""

import argparse
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

HOST = "127.0.0.1"
PATIENCE_S = 120.0


@dataclass(kw_only=True)
class Tally:
    """What clients have seen."""

    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Figures:
    requests: int
    errors: int
    per_second: float
    p50_ms: float
    p95_ms: float
    p99_ms: float

    @classmethod
    def of(cls, tally: Tally, elapsed: float) -> "Figures":
        ordered = sorted(tally.seconds) or [float("nan")]
        p50, p95, p99 = (
            1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.95, 0.99)
        )
        count = len(tally.seconds)
        return cls(
            requests=count, errors=len(tally.errors), per_second=count / elapsed, p50_ms=p50, p95_ms=p95, p99_ms=p99
        )


class Client:
    """One connection to the server."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection(HOST, port, timeout=PATIENCE_S)
        self._headers = {"Content-Type": "application/json"}

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        content = None if body is None else json.dumps(body)
        self._connection.request(method, path, content, self._headers)
        reply = self._connection.getresponse()
        text = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {text[:200].decode(errors='replace')}")
        return json.loads(text)

    def predict(self, pair: tuple[str, str]) -> Any:
        wanted = {"questions": [{"src_addr": pair[0], "dst_addr": pair[1]}], "bins": 100}
        return self.ask("POST", "/api/v1/predict", wanted)


@contextmanager
def server(options: Sequence[str], cache: str) -> Iterator[tuple[int, float]]:
    """A server that is just being started: its port, and when it was."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ping_llm", "serve", "--port", str(port), *options]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    began = time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment | {"XDG_CACHE_HOME": cache}) as process:
        try:
            yield port, began
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def first_answer(port: int, began: float, pair: tuple[str, str]) -> float:
    """Seconds from the start of the server to its first prediction."""
    while time.monotonic() - began < PATIENCE_S:
        try:
            Client(port).predict(pair)
            return time.monotonic() - began
        except OSError:
            time.sleep(0.05)
    raise SystemExit("the server does not answer")


def until_warm(port: int, began: float) -> float:
    client = Client(port)
    while client.ask("GET", "/healthz")["status"] != "ok":
        time.sleep(0.2)
    return time.monotonic() - began


def measured_pairs(port: int, count: int = 40) -> list[tuple[str, str]]:
    """Pairs of the most measured sources; stand-ins, if the server knows nobody."""
    client = Client(port)
    pairs = []
    for found in client.ask("GET", f"/api/v1/addresses?role=source&count={count}")["addresses"]:
        source = found["address"]
        destinations = client.ask("GET", f"/api/v1/addresses?role=destination&source={source}&count=4")["addresses"]
        pairs += [(source, one["address"]) for one in destinations]
    return pairs or [("192.0.2.1", f"192.0.2.{n}") for n in range(2, 100)]


def one_client(port: int, pairs: Sequence[tuple[str, str]], seconds: float, seed: int, tally: Tally) -> None:
    draw, client, end = random.Random(seed), Client(port), time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        try:
            client.predict(draw.choice(pairs))
            tally.seconds.append(time.monotonic() - began)
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            tally.errors.append(f"{type(error).__name__}: {error}")
            client = Client(port)


def load(port: int, pairs: Sequence[tuple[str, str]], clients: int, seconds: float) -> tuple[Figures, list[str]]:
    tallies = [Tally() for _ in range(clients)]
    threads = [
        threading.Thread(target=one_client, args=(port, pairs, seconds, seed, tally))
        for seed, tally in enumerate(tallies)
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.monotonic() - began
    together = Tally(
        seconds=[one for tally in tallies for one in tally.seconds],
        errors=[one for tally in tallies for one in tally.errors],
    )
    return Figures.of(together, elapsed), together.errors[:3]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a run or an exported model; left out: the completer of the package")
    parser.add_argument("--rows", action="append", default=[], help="what the server knows; may be repeated")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    given = parser.parse_args()
    options = [*(["--checkpoint", given.checkpoint] if given.checkpoint else [])]
    for rows in given.rows:
        options += ["--rows", rows]
    found = measure(options, given.clients, min(given.seconds, 600.0))
    if given.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        show(found)
    if found["errors"] or found["load"]["errors"]:
        raise SystemExit(1)


def measure(options: Sequence[str], clients: int, seconds: float) -> dict[str, Any]:
    stand_in = ("192.0.2.1", "192.0.2.2")
    with tempfile.TemporaryDirectory(prefix="ping-llm-serve-load-") as cache:
        with server(options, cache) as (port, began):
            empty = first_answer(port, began, stand_in)
            empty_warm = until_warm(port, began)
        with server(options, cache) as (port, began):
            kept = first_answer(port, began, stand_in)
            kept_warm = until_warm(port, began)
            pairs = measured_pairs(port)
            single, _ = load(port, pairs, 1, min(10.0, seconds))
            many, errors = load(port, pairs, clients, seconds)
    return {
        "clients": clients,
        "seconds": seconds,
        "first_answer_s": {"nothing compiled": empty, "compiled before": kept},
        "warm_s": {"nothing compiled": empty_warm, "compiled before": kept_warm},
        "single": asdict(single),
        "load": asdict(many),
        "errors": errors,
    }


def show(found: dict[str, Any]) -> None:
    lines = [f"{'start':<24}{'first answer':>14}{'all compiled':>14}"]
    for name, first in found["first_answer_s"].items():
        lines.append(f"{name:<24}{first:>12.1f} s{found['warm_s'][name]:>12.1f} s")
    lines.append("")
    lines.append(f"{'clients':<10}{'requests':>10}{'errors':>8}{'per second':>12}{'p50':>10}{'p95':>10}{'p99':>10}")
    for clients, row in ((1, found["single"]), (found["clients"], found["load"])):
        lines.append(
            f"{clients:<10}{row['requests']:>10,}{row['errors']:>8}{row['per_second']:>12.1f}"
            f"{row['p50_ms']:>7.0f} ms{row['p95_ms']:>7.0f} ms{row['p99_ms']:>7.0f} ms"
        )
    lines += [f"error: {error}" for error in found["errors"]]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
