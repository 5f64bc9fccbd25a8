"""The mean of models of one shape: `python scripts/average_weights.py MODEL OTHER … --output FOLDER`.

Models are runs, exported folders, or `completer`. Configuration and card are those of the first. The completer of the
package is the mean of the weights before and after the last part of its training.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from ping_llm.core.errors import PingLlmError
from ping_llm.runs.task import model_card
from ping_llm.runs.trained import load_trained
from ping_llm.runs.weights import check_replaceable, save_trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    try:
        check_replaceable(options.output, overwrite=False)
        first, *others = (load_trained(where) for where in options.models)
        weights = jax.tree.map(_mean, first.weights, *(other.weights for other in others))
    except (PingLlmError, ValueError) as error:
        sys.exit(f"error: {error}")
    save_trained(replace(first, weights=weights), options.output, model_card(first))


def _mean(*leaves: jax.Array) -> jax.Array:
    return jnp.mean(jnp.stack([leaf.astype(jnp.float32) for leaf in leaves]), axis=0)


if __name__ == "__main__":
    main()
