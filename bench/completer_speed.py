"""How long the completer of the package takes, with NumPy and with JAX: `python bench/completer_speed.py`.

A matrix of 300 queries over 1,500 measurements of 40 nodes, then one more query about the same history, and one about
another history of that size. On a shared machine CPU seconds say more than elapsed ones.
"""

import time

import numpy as np

from ping_llm import Predictor
from ping_llm.core.console import out
from ping_llm.core.rtt import Observations, Questions

NODES, MEASUREMENTS, QUERIES = 40, 1500, 300


def history(seed: int) -> tuple[Observations, Questions]:
    """Nodes on a plane, each with an access of its own; pairs that may have been measured before."""
    rng = np.random.default_rng(seed)
    place, access = rng.uniform(0, 100, (NODES, 2)), rng.exponential(5, NODES)
    source, destination = rng.integers(0, NODES, (2, MEASUREMENTS + QUERIES))
    destination = np.where(source == destination, (source + 1) % NODES, destination)
    rtt = np.linalg.norm(place[source] - place[destination], axis=1) + access[source] + access[destination]
    every = Observations(source=source, destination=destination, time_s=np.full(len(rtt), np.nan), rtt_ms=rtt + 1)
    return every.take(slice(0, MEASUREMENTS)), every.take(slice(MEASUREMENTS, None)).questions


def main() -> None:
    nodes = [f"10.{number}.0.1" for number in range(NODES)]
    for backend in ("numpy", "jax"):
        predictor = Predictor.from_pretrained(backend=backend)
        first, other = history(0), history(1)
        for what, (known, queries) in {
            "first matrix": first,
            "another matrix": other,
            "one more query": (other[0], other[1].take([0])),
            "one query about another history": (first[0].take(slice(0, None, 2)), first[1].take([0])),
        }.items():
            wall, cpu = time.perf_counter(), time.process_time()
            predictor.predict(known, queries, nodes)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            out.print(f"{backend:6} {what:32} {wall:7.3f} s, {cpu:7.3f} CPU s")


if __name__ == "__main__":
    main()
