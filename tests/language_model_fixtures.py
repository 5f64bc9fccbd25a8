"""A language model of random weights, rows for it to read, and the plain transformer on whole sequences to compare."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from ipaddress import ip_address
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from flax import nnx

from ping_llm.config import Config
from ping_llm.models.lm import ModelSettings, Transformer
from ping_llm.predict.language_model import LanguageModel
from ping_llm.predict.prompts import spell
from ping_llm.rows.format import ProbeRow
from ping_llm.tokens import FIELD_ORDERS
from plain_encoder import encode_one

TINY = ModelSettings(
    layers=2,
    width=32,
    heads=2,
    head_dim=16,
    mlp_width=48,
    qk_norm=True,
    byte_features=4,
    dtype="float32",
    attention="plain",
)
LENGTH = 96
START_S = 1_700_000_000
SOURCES = {4: "192.0.2.1", 6: "2001:db8::1"}
RESULT_LAST = ("time", "source", "destination", "result")
DESTINATION_LAST = ("time", "source", "result", "destination")


@cache
def untrained() -> LanguageModel:
    """Weights drawn at random: every token counts."""
    weights = nnx.state(Transformer(TINY, nnx.Rngs(0)))
    return LanguageModel(config=Config(max_target_length=LENGTH), settings=TINY, weights=weights)


def random_row(count: int, family: int = 4, seed: int = 0) -> ProbeRow:
    """Some failed, some after long gaps, some at the same second."""
    random = np.random.default_rng(seed)
    gaps = random.choice([0, 60, 240, 4000], count)
    rtt = random.lognormal(3, 1, count).astype(np.float32)
    rtt[random.random(count) < 0.2] = np.nan
    return ProbeRow(
        family=family,
        source=ip_address(SOURCES[family]).packed,
        time_us=(START_S + np.cumsum(gaps)) * 1_000_000,
        destinations=random.integers(0, 256, (count, 4 if family == 4 else 16), dtype=np.uint8),
        rtt_ms=rtt,
    )


def written(row: ProbeRow, chosen: Sequence[int], *, timed: bool, order: Sequence[str]) -> list[list[int]]:
    """Tokens of each of these measurements, by the specification."""
    spelled, before = [], None
    for i in chosen:
        now = int(row.time_us[i]) // 1_000_000
        kind, value = "none", 0
        if timed:
            kind, value = ("absolute", now) if before is None else ("delta1", now - before)
            kind = "delta4" if kind == "delta1" and value > 255 else kind
        before = now
        rtt = None if np.isnan(row.rtt_ms[i]) else float(row.rtt_ms[i])
        destination = row.destinations[i].tobytes()
        spelled.append(encode_one(row.family, row.source, destination, rtt, kind, value, order))
    return spelled


@cache
def _transformer() -> Any:
    model = untrained()
    return nnx.jit(nnx.merge(nnx.graphdef(Transformer(TINY, nnx.Rngs(1))), model.weights), static_argnums=3)


def plain(sequences: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
    """Log-probabilities of what comes after each token: [sequences, length, vocabulary]."""
    length = max(LENGTH, -(-max(map(len, sequences)) // 64) * 64)
    tokens = np.zeros((1 << (len(sequences) - 1).bit_length(), length), dtype=np.int32)
    for row, sequence in zip(tokens, sequences, strict=False):
        row[: len(sequence)] = sequence
    position = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    logits = _transformer()(tokens, position, np.ones_like(tokens), 1)
    return np.asarray(jax.nn.log_softmax(logits), dtype=np.float64)[: len(sequences)]


TARGETS = {"10.1.1.1": 5.0, "10.7.7.7": 40.0, "172.16.3.3": 200.0}


def small_world(count: int, seed: int) -> ProbeRow:
    """A source that measures three destinations, each at its own distance."""
    random = np.random.default_rng(seed)
    which = random.integers(0, 3, count)
    packed = np.array([list(ip_address(address).packed) for address in TARGETS], dtype=np.uint8)
    rtt = np.array(list(TARGETS.values()))[which] * random.uniform(0.98, 1.02, count)
    return ProbeRow(
        family=4,
        source=ip_address(SOURCES[4]).packed,
        time_us=(START_S + 60 * np.arange(count)) * 1_000_000,
        destinations=packed[which],
        rtt_ms=rtt.astype(np.float32),
    )


@cache
def trained() -> LanguageModel:
    """Knows the small world, in any order of fields, without times."""
    model, graph, optimizer = untrained(), nnx.graphdef(Transformer(TINY, nnx.Rngs(1))), optax.adam(1e-2)

    @jax.jit
    def step(weights: Any, state: Any, tokens: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            logits = nnx.merge(graph, weights)(tokens, position, jnp.ones_like(tokens), 1)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

        change, state = optimizer.update(jax.grad(loss)(weights), state)
        return optax.apply_updates(weights, change), state

    weights, state = model.weights, optimizer.init(model.weights)
    for number in range(200):
        row = small_world(8 * 6, seed=number)
        orders = np.random.default_rng([number, 1]).integers(0, len(FIELD_ORDERS), len(row))
        tokens, _ = spell(row, np.arange(len(row)), timed=False, order=orders)
        weights, state = step(weights, state, tokens.reshape(8, -1).astype(np.int32))
    return replace(model, weights=weights)
