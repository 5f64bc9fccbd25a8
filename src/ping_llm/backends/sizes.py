"""What backends read from a configuration alike."""

from ping_llm.config import Config
from ping_llm.errors import PingLlmError
from ping_llm.pipeline.loader import LoaderSettings


def batch_size(config: Config, devices: int) -> int:
    """Sequences of a global batch."""
    batch = config.per_device_batch_size * devices
    if batch != int(batch) or batch < 1:
        raise PingLlmError(
            f"per_device_batch_size × {devices} device(s) = {batch:g} is not a whole number of sequences"
        )
    return int(batch)


def loader_settings(config: Config, host: int, hosts: int) -> LoaderSettings:
    return LoaderSettings(
        worker_count=config.grain_worker_count,
        buffer_size=config.grain_per_worker_buffer_size,
        ram_budget_mb=config.grain_ram_budget_mb,
        debug=config.grain_debug_mode,
        visualization_dir=config.grain_visualization_dir,
        host=host,
        hosts=hosts,
    )
