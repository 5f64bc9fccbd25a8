"""What training minimises: cross entropy of the RTT's bins, and of failure."""

import jax
import jax.numpy as jnp

from ping_llm.completer.bins import Bins
from ping_llm.completer.worlds import Batch
from ping_llm.model.loss import Sums


def loss_sums(bin_logits: jax.Array, failure_logit: jax.Array, batch: Batch) -> Sums:
    """Sums, not means, so that parts of a batch add up exactly.

    The target is shared between the two bins around the value. That costs up to ln 2 of loss that no model can avoid
    (0.5 nats on average where the answer is certain), and tells the model where inside a bin the value was.
    """
    counts = batch["question_counts"]
    answered = counts & ~batch["question_failed"]
    lower, share = Bins(bin_logits.shape[-1]).between(batch["question_log_rtt"])
    normaliser = jax.nn.logsumexp(bin_logits, axis=-1)
    right = (1 - share) * _at(bin_logits, lower) + share * _at(bin_logits, lower + 1)
    cross_entropy = jnp.sum(jnp.where(answered, normaliser - right, 0.0))
    surprise = jax.nn.softplus(jnp.where(batch["question_failed"], -failure_logit, failure_logit))
    failure = jnp.sum(jnp.where(counts, surprise, 0.0))
    return {
        "objective": cross_entropy + failure,
        "cross_entropy": cross_entropy + failure,
        "rtt_entropy": cross_entropy,
        "failure_entropy": failure,
        "answered": jnp.sum(answered, dtype=jnp.int32),
        "targets": jnp.sum(counts, dtype=jnp.int32),
    }


def _at(logits: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits, places[..., None], axis=-1)[..., 0]
