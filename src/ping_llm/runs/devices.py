"""The devices: how they share the work, and how fast one could be."""

from typing import Final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ping_llm.config import Config
from ping_llm.core.errors import PingLlmError

_PEAK_TFLOPS: Final = {
    "H200": 989,
    "H100": 989,
    "GH200": 989,
    "B200": 2250,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "TPU v4": 275,
    "TPU v5 lite": 197,
    "TPU v5e": 197,
    "TPU v5p": 459,
    "TPU v6 lite": 918,
}
"""Dense bfloat16 products, by the makers' data sheets. The first name found in the device's kind counts."""

_SMALLEST_SHARDED: Final = 2**12
"""Arrays smaller than this stay whole on every device: sharing them out saves nothing."""


def make_mesh(config: Config) -> Mesh:
    """All devices, as `data` × `fsdp`."""
    devices = jax.device_count()
    fsdp, data = config.ici_fsdp_parallelism, config.ici_data_parallelism
    if data < 0:
        data = max(1, devices // fsdp)
    if data * fsdp != devices:
        raise PingLlmError(
            f"ici_data_parallelism × ici_fsdp_parallelism = {data} × {fsdp}, but there are {devices} devices"
        )
    return jax.make_mesh((data, fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto, AxisType.Auto))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sequences are shared out over all devices."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def weight_sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Along the largest axis that `fsdp` divides; copies over `data`."""
    fsdp = mesh.shape["fsdp"]
    axes: list[str | None] = [None] * len(shape)
    divisible = [i for i, size in enumerate(shape) if size % fsdp == 0]
    if fsdp > 1 and divisible and np.prod(shape) >= _SMALLEST_SHARDED:
        axes[max(divisible, key=lambda i: shape[i])] = "fsdp"
    return NamedSharding(mesh, PartitionSpec(*axes))


def peak_flops(config: Config) -> float | None:
    """Of one device and second; None if unknown."""
    if config.peak_tflops:
        return config.peak_tflops * 1e12
    kind = jax.devices()[0].device_kind
    return next((tflops * 1e12 for name, tflops in _PEAK_TFLOPS.items() if name in kind), None)
