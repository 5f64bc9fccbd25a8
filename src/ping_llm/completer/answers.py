"""What the model answers: a mixture of bins, and of narrow kernels around what was measured before.

Bins are 2 % wide, and a quiet pair repeats itself to a few per mille. So a question also points at measurements of its
context: "about what this one took", more or less exactly. How much of the answer is in the bins, and how much in each
precision, is for the model to say. A small model (4 layers of 192, 1,000 steps) that may point is at 2.49 nats where
the pair was measured before and at 5.03 elsewhere, one that may not at 3.02 and 5.13.

    choice    log shares of the bins and of each precision
    pointed   log shares of the context's measurements
    kernel    Laplace, of a fixed width in ln RTT for each precision

For prediction, all of it is put on a grid of finer bins.
"""

# mypy: disallow-untyped-calls=False
from dataclasses import dataclass
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from ping_llm.completer.bins import Bins

KERNEL_WIDTHS: Final = (0.0015, 0.006, 0.025, 0.1, 0.3)
PRECISIONS: Final = len(KERNEL_WIDTHS)
FINE: Final = 4096
"""Bins of the grid, 0.26 % each."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Answers:
    bin_logits: jax.Array
    """[contexts, questions, bins]"""
    failure_logit: jax.Array
    """[contexts, questions]"""
    choice: jax.Array
    """[contexts, questions, 1 + precisions], log shares"""
    pointed: jax.Array
    """[contexts, questions, context], log shares"""
    context_log_rtt: jax.Array
    """[contexts, context]"""

    @property
    def bins(self) -> Bins:
        return Bins(self.bin_logits.shape[-1])

    def log_density(self, log_rtt: jax.Array) -> jax.Array:
        """Of one ln RTT for each question, in bins: 0 where it is spread evenly over one of them."""
        lower, share = self.bins.between(log_rtt)
        log_bins = self.bin_logits - jax.nn.logsumexp(self.bin_logits, axis=-1, keepdims=True)
        ends = jnp.stack([_at(log_bins, lower), _at(log_bins, lower + 1)], axis=-1)
        of_bins = jax.nn.logsumexp(ends, axis=-1, b=jnp.stack([1 - share, share], axis=-1))
        distance = jnp.abs(log_rtt[:, :, None] - self.context_log_rtt[:, None])
        parts = [of_bins]
        for width in KERNEL_WIDTHS:
            near = jax.nn.logsumexp(self.pointed - distance / width, axis=-1)
            parts.append(near + np.log(self.bins.width / (2 * width)))
        return jax.nn.logsumexp(self.choice + jnp.stack(parts, axis=-1), axis=-1)

    def probabilities(self) -> jax.Array:
        """[contexts, questions, fine bins]"""
        fine = Bins(FINE)
        share = jnp.exp(self.choice)
        found = share[..., :1] * (jax.nn.softmax(self.bin_logits, axis=-1) @ _refined(self.bins, fine))
        lower, part = fine.between(self.context_log_rtt)
        for precision, width in enumerate(KERNEL_WIDTHS):
            weight = jnp.exp(self.pointed) * share[..., 1 + precision, None]
            at_places = jax.vmap(_spread)(weight, lower, part)
            found += _convolved(at_places, _laplace(width, fine))
        return found / jnp.sum(found, axis=-1, keepdims=True)


def _at(columns: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.take_along_axis(columns, places[..., None], axis=-1)[..., 0]


def _refined(coarse: Bins, fine: Bins) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """From probabilities of bins to those of finer ones, along the straight lines between the coarse centres."""
    at = np.clip((fine.centres - coarse.centres[0]) / coarse.width, 0, coarse.count - 1)
    near = np.maximum(1 - np.abs(at - np.arange(coarse.count)[:, None]), 0)
    return (near * fine.width / coarse.width).astype(np.float32)


def _spread(weight: jax.Array, lower: jax.Array, part: jax.Array) -> jax.Array:
    """[questions, FINE]: weights of the context's measurements, at their places."""
    empty = jnp.zeros((weight.shape[0], FINE))
    return empty.at[:, lower].add(weight * (1 - part)).at[:, lower + 1].add(weight * part)


def _laplace(width: float, fine: Bins) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Shares of the bins around the middle one: odd many, until nothing is left."""
    reach = min(int(np.ceil(12 * width / fine.width)), FINE // 4)
    edge = (np.arange(-reach, reach + 2) - 0.5) * fine.width / width
    until = np.where(edge < 0, np.exp(np.minimum(edge, 0)) / 2, 1 - np.exp(-np.maximum(edge, 0)) / 2)
    share = np.diff(until)
    return (share / share.sum()).astype(np.float32)


def _convolved(columns: jax.Array, kernel: np.ndarray[tuple[int], np.dtype[np.float32]]) -> jax.Array:
    size = FINE + len(kernel) - 1
    product = jnp.fft.rfft(columns, size) * np.fft.rfft(kernel, size).astype(np.complex64)
    reach = len(kernel) // 2
    return jnp.maximum(jnp.fft.irfft(product, size)[..., reach : reach + FINE], 0.0)
