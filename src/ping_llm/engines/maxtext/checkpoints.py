"""MaxText's checkpoints as files: only weights, and without MaxText. They are Orbax's, and so are ours."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from ping_llm.engines.maxtext.weights import Arrays
from ping_llm.errors import PingLlmError

_ITEM = "items"


def write_weights(folder: Path, arrays: Arrays) -> Path:
    """A checkpoint of weights alone; returns what MaxText's `load_parameters_path` wants."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, last = name.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = jax.numpy.asarray(array)
    ocp.save(folder.absolute(), {"params": {"params": tree}}, checkpointable_name=_ITEM)
    return folder / _ITEM


def read_weights(checkpoint: Path) -> Arrays:
    """The weights in `RUN/checkpoints/STEP` (or its `items`), by path."""
    root = checkpoint.absolute()
    root = root.parent if root.name == _ITEM else root
    if not (root / _ITEM).is_dir():
        raise PingLlmError(f"{checkpoint} is not a checkpoint of MaxText: give RUN/checkpoints/STEP")
    try:
        stored: Any = ocp.metadata(root, checkpointable_name=_ITEM).metadata
        wanted = stored["params"]["params"]
        place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), wanted)
        only_weights = ocp.Context()
        only_weights.pytree.loading.partial_load = True
        with only_weights:
            found: Any = ocp.load(root, {"params": {"params": like}}, checkpointable_name=_ITEM)
    except (KeyError, TypeError) as error:
        raise PingLlmError(f"{checkpoint} holds no weights of MaxText ({error!r})") from None
    leaves = jax.tree_util.tree_flatten_with_path(found["params"]["params"])[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}
