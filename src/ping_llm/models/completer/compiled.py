"""The completer's network compiled by JAX: for accelerators."""

from dataclasses import replace
from typing import Any, Final

import jax
import numpy as np
from flax import nnx

from ping_llm.models.completer.model import SetTransformer
from ping_llm.models.completer.network import CompleterSettings, Encoded, Measurements
from ping_llm.models.layers import Singles
from ping_llm.models.modules import keep_compiled, with_arrays

# mypy: disallow-untyped-calls=False

_CONTEXT_SIZES: Final = (64, 256, 1024, 2048, 4096, 8192)
_QUERY_SIZES: Final = (1, 16, 256)
"""Shapes to compile for: a few, each some seconds of compiling."""


class OnJax:
    """Compiled for a few shapes, which contexts and queries are padded to."""

    def __init__(self, settings: CompleterSettings, weights: dict[str, Singles], contexts_at_once: int) -> None:
        keep_compiled()
        if jax.default_backend() == "cpu" and settings.dtype != "float32":  # which computes 16 bits slower than 32
            settings = replace(settings, dtype="float32")
        settings = replace(settings, attention="plain")
        graph, state = nnx.split(nnx.eval_shape(lambda: SetTransformer(settings, nnx.Rngs(0))))
        self.contexts_at_once, self.queries_at_once = contexts_at_once, _QUERY_SIZES[-1]
        self._weights = with_arrays(state, weights)

        @jax.jit
        def encode(weights: Any, context: Measurements) -> Encoded:
            return nnx.merge(graph, weights).encode(context)

        @jax.jit
        def answer(weights: Any, encoded: Encoded, source: Any, destination: Any) -> tuple[jax.Array, jax.Array]:
            answers = nnx.merge(graph, weights).answer(encoded, source, destination)
            return answers.probabilities(), jax.nn.sigmoid(answers.failure_logit)

        self._encode, self._answer = encode, answer

    def padded_context(self, slots: int) -> int:
        return _padded(slots, _CONTEXT_SIZES)

    def padded_queries(self, queries: int) -> int:
        return _padded(queries, _QUERY_SIZES)

    def encode(self, context: Measurements) -> Encoded:
        return self._encode(self._weights, context)

    def answer(self, encoded: Encoded, source: Singles, destination: Singles) -> tuple[Singles, Singles]:
        probability, p_failed = self._answer(self._weights, encoded, source, destination)
        return np.asarray(probability), np.asarray(p_failed)


def _padded(count: int, sizes: tuple[int, ...]) -> int:
    """The least of a few sizes that holds so many, or just so many."""
    return next((size for size in sizes if count <= size), count)
