"""Which part of a batch this process gives.

MaxText's global array has `to_load` rows, laid out over all devices of the mesh in order. It trains on the first
`to_use` of them; with `expansion_factor_real_data`, or less than one sequence a device, that is not all.
"""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ping_llm.errors import PingLlmError


@dataclass(frozen=True, kw_only=True)
class Share:
    """Of the global batch, this process gives part `host` of `hosts` equal ones."""

    host: int
    hosts: int
    rows: int
    """That this process contributes to the global array. Those after its part of the batch are never trained on."""
    sharding: NamedSharding
    global_rows: int


def share_of(mesh: Any, *, to_load: int, to_use: int) -> Share:
    """This process's share, or an error if the batch cannot be shared evenly.

    Where a process's devices do not lie side by side in the mesh, its rows of the batch are spread likewise: the batch
    then has the same sequences in another order.
    """
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    first: dict[int, int] = {}
    places: Any = sharding.devices_indices_map((to_load, 1))
    for device, (rows, *_) in places.items():
        first[device.process_index] = min(first.get(device.process_index, to_load), rows.start or 0)
    order = sorted(first, key=first.__getitem__)
    rows_each = to_load // len(order)
    hosts = max(1, to_use // rows_each)
    if to_use % hosts or to_use // hosts > rows_each:
        raise PingLlmError(f"a batch of {to_use} sequences cannot be shared evenly by {len(order)} processes")
    host = order.index(jax.process_index())
    if host >= hosts or 0 not in order[:hosts]:
        raise PingLlmError(
            "with these parallelism settings expansion_factor_real_data makes process 0, which stores where the data "
            "is, load none; use -1"
        )
    return Share(host=host, hosts=hosts, rows=rows_each, sharding=sharding, global_rows=to_load)
