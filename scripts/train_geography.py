"""Fit the small network of `models/completer/geography.py` on simulated Internets: `python scripts/train_geography.py`.

The completer of the package answers queries about worlds whose nodes have positions. What it says, what the distance
model of the same context says, and what the RTT was are then all that the small network learns from: how much to trust
either, by the features of a query. Takes a quarter of an hour on two cores, nearly all of it for the answers, which
`--answers` keeps.
"""

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy
from flax import nnx

from ping_llm.core.console import err
from ping_llm.core.geography import light_ms
from ping_llm.models.completer.geography import SHAPES, WEIGHTS, Densities, DistanceModel, features, log_pooled
from ping_llm.models.completer.model import SetTransformer
from ping_llm.models.completer.network import BINS, FINE, Bins
from ping_llm.prior.selection import ANSWERED
from ping_llm.prior.worlds import WorldSettings, worlds_of
from ping_llm.runs.trained import completer_settings, load_trained
from ping_llm.runs.weights import state_of

WORLDS = WorldSettings(context=512, questions=96, most_nodes=300, geography=True)
AT_ONCE = 8
COLUMNS = ("features", "log_predicted", "probability", "bin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=4800)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--answers", type=Path, help="a .npz file: read if it is there, else written")
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    options = parser.parse_args()
    if options.answers and options.answers.exists():
        answers = dict(np.load(options.answers))
    else:
        answers = answers_about_worlds(options.worlds, options.seed)
        if options.answers:
            np.savez(options.answers, allow_pickle=False, **answers)
    weights = fitted(answers, options.steps)
    safetensors.numpy.save_file(
        {name: np.asarray(array, np.float32) for name, array in weights.items()}, options.output
    )


def answers_about_worlds(worlds: int, seed: int) -> dict[str, np.ndarray]:
    trained = load_trained()
    settings = replace(completer_settings(trained.config), dtype="float32", attention="plain")
    graph, _ = nnx.split(nnx.eval_shape(lambda: SetTransformer(settings, nnx.Rngs(0))))
    weights = state_of(trained)

    @jax.jit
    def answered(batch: Any) -> jax.Array:
        fine = nnx.merge(graph, weights)(batch).probabilities()
        return fine.reshape(*fine.shape[:2], BINS, FINE // BINS).sum(axis=-1)

    make = jax.jit(partial(worlds_of, WORLDS))
    found: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
    begin = time.monotonic()
    for step in range(worlds // AT_ONCE):
        ones = np.ones(AT_ONCE, np.int32)
        batch = make(seed * ones, step * ones, np.arange(AT_ONCE, dtype=np.int32))
        probability = np.asarray(answered(batch))
        batch = {name: np.asarray(column) for name, column in batch.items()}
        for world in range(AT_ONCE):
            _add(found, {name: column[world] for name, column in batch.items()}, probability[world])
        if step % 20 == 0:
            err.print(f"{(step + 1) * AT_ONCE} worlds, {time.monotonic() - begin:.0f} s", markup=False)
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _add(found: dict[str, list[np.ndarray]], world: dict[str, np.ndarray], probability: np.ndarray) -> None:
    position = world["node_position"]
    counts = np.arange(len(world["context_kind"])) < world["context_length"]
    rtt = np.where(counts & (world["context_kind"] == ANSWERED), np.exp(world["context_log_rtt"]), np.nan)
    model = DistanceModel.between(position, world["context_source"], world["context_destination"], rtt)
    source, destination = world["question_source"], world["question_destination"]
    light = light_ms(position[source], position[destination])
    some = np.flatnonzero(world["question_counts"] & ~world["question_failed"] & (light >= 0))
    ends = source[some], destination[some], light[some]
    answers = Densities(probability[some], Bins(BINS).centres)
    found["features"].append(features(answers, model, *ends))
    found["log_predicted"].append(np.log(model.predict(*ends)).astype(np.float32))
    found["probability"].append(probability[some].astype(np.float16))
    lower, part = Bins(BINS).between(world["question_log_rtt"][some])
    found["bin"].append((lower + (part > 0.5)).astype(np.int32))


def fitted(answers: dict[str, np.ndarray], steps: int, held_out: float = 0.1, batch: int = 2048) -> dict[str, Any]:
    random = np.random.default_rng(0)
    data = {name: jnp.asarray(column) for name, column in answers.items()}
    cut = round((1 - held_out) * len(answers["bin"]))  # by worlds
    weights = {name: jnp.asarray(random.normal(size=shape) * shape[0] ** -0.5) for name, shape in SHAPES.items()}
    weights |= {name: jnp.zeros(shape) for name, shape in SHAPES.items() if "bias" in name or name == "last"}
    weights["last_bias"] = jnp.array([0.0, -2.0, 0.0, -1.0, 0.0])
    weights |= {"mean": data["features"].mean(axis=0), "deviation": data["features"].std(axis=0) + 1e-3}
    centres = jnp.asarray(Bins(BINS).centres, jnp.float32)

    def losses(weights: Any, rows: jax.Array) -> jax.Array:
        answered = Densities(data["probability"][rows].astype(jnp.float32), centres)
        log = log_pooled(weights, data["features"][rows], answered, data["log_predicted"][rows])
        return -jnp.take_along_axis(jax.nn.log_softmax(log), data["bin"][rows, None], axis=1)[:, 0]

    fixed = ("mean", "deviation")
    labels = {name: "fixed" if name in fixed else "free" for name in weights}
    rate = optax.cosine_decay_schedule(5e-3, steps)
    optimizer = optax.partition({"free": optax.adam(rate), "fixed": optax.set_to_zero()}, labels)
    state = optimizer.init(weights)

    @jax.jit
    def step(weights: Any, state: Any, rows: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: losses(w, rows).mean())(weights)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(weights, updates), state, loss

    for number in range(steps):
        weights, state, loss = step(weights, state, jnp.asarray(random.integers(0, cut, batch)))
        if number % 250 == 0:
            err.print(f"step {number}: {loss:.3f} nats per query", markup=False)
    rest = jnp.arange(cut, len(answers["bin"]))
    after = np.concatenate([np.asarray(jax.jit(losses)(weights, rows)) for rows in np.array_split(rest, 8)])
    chosen = np.asarray(data["probability"][rest, data["bin"][rest]], np.float32)
    before = -np.log(np.maximum(chosen, 1e-9) / np.asarray(data["probability"][rest], np.float32).sum(axis=1))
    fewest = np.expm1(np.asarray(data["features"])[rest, 4])  # measurements of the end that has fewer
    for title, rows in (("neither or one end measured", fewest < 0.5), ("both ends measured", fewest > 0.5)):
        err.print(f"held out, {title}: {before[rows].mean():.3f} -> {after[rows].mean():.3f} nats", markup=False)
    return weights


if __name__ == "__main__":
    main()
