"""Real measurements for fine-tuning the completer: read once, then on the device."""

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ping_llm.baselines.interface import Observations
from ping_llm.completer.measured import Measurements, on_device_measurements
from ping_llm.config import Config
from ping_llm.errors import PingLlmError
from ping_llm.sources.observations import read_observations


@dataclass(frozen=True)
class MeasuredData:
    observations: Observations
    nodes: tuple[str, ...]
    """Addresses of the nodes' numbers."""

    @cached_property
    def digest(self) -> str:
        """Of what was measured: another digest is other data."""
        hashed = hashlib.sha256()
        for column in vars(self.observations).values():
            hashed.update(column.tobytes())
        hashed.update("\n".join(self.nodes).encode())
        return hashed.hexdigest()[:16]

    @cached_property
    def on_device(self) -> Measurements:
        return on_device_measurements(self.observations, self.nodes)


def measurements_of(config: Config) -> MeasuredData:
    """The measurements that a run with `dataset_type=measured` learns from."""
    if not config.network_train_files:
        raise PingLlmError("network_train_files is not set: give measurement files, or the train folder of a split")
    return _read(config.network_train_files)


@lru_cache(maxsize=1)
def _read(files: str) -> MeasuredData:
    measured = read_observations([files])
    return MeasuredData(measured.observations, measured.nodes)
