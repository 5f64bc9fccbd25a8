"""What training minimises: the surprise of RTTs and of failures."""

import jax
import jax.numpy as jnp

from ping_llm.completer.answers import Answers
from ping_llm.completer.worlds import Batch
from ping_llm.model.loss import Sums


def loss_sums(answers: Answers, batch: Batch) -> Sums:
    """Sums, not means, so that parts of a batch add up exactly. RTTs count by their density, in bins."""
    counts = batch["question_counts"]
    answered = counts & ~batch["question_failed"]
    density = answers.log_density(batch["question_log_rtt"])
    of_rtt = -jnp.sum(jnp.where(answered, density, 0.0))
    logit = answers.failure_logit
    of_failure = jnp.sum(jnp.where(counts, jax.nn.softplus(jnp.where(batch["question_failed"], -logit, logit)), 0.0))
    return {
        "objective": of_rtt + of_failure,
        "cross_entropy": of_rtt + of_failure,
        "rtt_entropy": of_rtt,
        "failure_entropy": of_failure,
        "answered": jnp.sum(answered, dtype=jnp.int32),
        "targets": jnp.sum(counts, dtype=jnp.int32),
    }
