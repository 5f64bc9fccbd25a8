"""Cross entropy of the next token, over the places that predict something."""

import jax
import jax.numpy as jnp

Sums = dict[str, jax.Array]


def loss_sums(logits: jax.Array, targets: jax.Array, targets_segmentation: jax.Array, z_loss: float = 0.0) -> Sums:
    """Sums, not means, so that parts of a batch (micro-batches, hosts, evaluation batches) add up exactly.

    `z_loss` pulls the logarithm of the normaliser to zero, which keeps logits from drifting; what is reported as
    `cross_entropy` is without it.
    """
    counted = targets_segmentation > 0
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    cross_entropy = jnp.sum(jnp.where(counted, normaliser - right, 0.0))
    penalty = z_loss * jnp.sum(jnp.where(counted, normaliser**2, 0.0)) if z_loss else 0.0
    return {
        "objective": cross_entropy + penalty,
        "cross_entropy": cross_entropy,
        "targets": jnp.sum(counted, dtype=jnp.int32),
    }
