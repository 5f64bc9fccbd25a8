"""The keys there are, section by section, and `Config`, which has them all.

To add keys: declare them in a section here (or in a new `Section`, which then becomes a base of `Config`), and run
`python -m ping_llm.config docs/configuration.md`. Loading, checking, storing and documenting them follows.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import yaml

from ping_llm.config.blend import parse_blend
from ping_llm.config.keys import KeyInfo, Rule, Section, above, at_least, key, one_of, unknown_key
from ping_llm.errors import PingLlmError

_NOT_EMPTY = Rule("a folder", bool)
_RUN_NAME = Rule("a plain folder name", lambda name: not set(name) & set("/\\") and name not in (".", ".."))
_FILES = Rule("a folder, a pattern or a blend", lambda text: not text or bool(parse_blend(text)))


@dataclass(frozen=True, kw_only=True)
class RunKeys(Section):
    """What the run is called, where its output goes, and how long it lasts."""

    title: ClassVar[str] = "Run"

    run_name: str = key("", "Name of the run, and of its folder; empty = made from the time of the start.", _RUN_NAME)
    base_output_directory: str = key("runs", "Folder that holds the folders of the runs.", _NOT_EMPTY)
    steps: int = key(5_000, "Training steps of the whole run, those before a resume included.", at_least(1))
    allow_data_change: bool = key(False, "Permit resuming a run with other data or other data settings.")


@dataclass(frozen=True, kw_only=True)
class DataKeys(Section):
    """What is learnt from. These and the number of devices decide every training batch; nothing else does."""

    title: ClassVar[str] = "Data"

    dataset_type: str = key(
        "network",
        "Where batches come from. So far `network` (latency measurements) and `synthetic` (random tokens) work.",
        one_of("network", "grain", "hf", "tfds", "c4_mlperf", "synthetic"),
    )
    network_data_format: str = key(
        "probe_chunks",
        "`probe_chunks` = probe rows of `ping-llm prepare`; `network_parquet` = measurement files, unprepared.",
        one_of("probe_chunks", "network_parquet"),
    )
    network_train_files: str = key("", "Training data: a prepared folder, a pattern of its shards, or a blend.", _FILES)
    network_eval_files: str = key("", "Evaluation data, written likewise; of a folder, its evaluation split.", _FILES)
    network_context_measurements: int = key(30, "A row gives one context per so many measurements.", at_least(1))
    network_max_contexts: int = key(16, "A row gives at most so many contexts an epoch.", at_least(1))
    network_skip_corrupt_rows: bool = key(
        False, "true = leave out rows that cannot be read and count them; false = stop at the first."
    )
    data_shuffle_seed: int = key(0, "Seed of the order and of all sampling.", at_least(0, up_to=2**32 - 1))
    per_device_batch_size: float = key(
        8.0, "Sequences a device and step; may be a fraction if times the devices it is whole.", above(0)
    )
    # The longest measurement (IPv6, absolute time) has 47 tokens: each fits the shortest sequence.
    max_target_length: int = key(1024, "Tokens of a sequence.", at_least(64))
    generate_padding_batch_train: bool = key(
        False, "Where the training data ends, go on with batches of padding, which carry no loss."
    )


@dataclass(frozen=True, kw_only=True)
class LoaderKeys(Section):
    """How batches are made: these change the speed and the memory, never the content of a training batch."""

    title: ClassVar[str] = "Loader"

    grain_worker_count: int = key(
        -1, "Worker processes; -1 = chosen from the cores and the RAM budget, 0 = none, in-process.", at_least(-1)
    )
    grain_per_worker_buffer_size: int = key(
        -1, "Finished batches a worker holds ready; -1 = chosen within the RAM budget.", at_least(1, or_else=-1)
    )
    grain_ram_budget_mb: int = key(
        4096, "Memory that workers and their buffers may take together, where -1 lets us choose.", at_least(1)
    )
    grain_debug_mode: bool = key(False, "Log time per stage, the share of waiting and the bottleneck.")
    grain_visualization_dir: str = key("", "Folder for the graph of the pipeline (SVG) and its numbers; empty = none.")
    expansion_factor_real_data: float = key(
        -1.0, "-1 = every host loads data; k > 1 = one host in k does (MaxText's meaning).", above(0, or_else=-1)
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationKeys(Section):
    """When the model is evaluated in training, and on how much."""

    title: ClassVar[str] = "Evaluation"

    eval_interval: int = key(-1, "Training steps from one evaluation to the next; -1 = never.", at_least(1, or_else=-1))
    eval_steps: int = key(
        -1, "Batches of an evaluation, at most; -1 = all of the evaluation data.", at_least(1, or_else=-1)
    )
    generate_padding_batch_eval: bool = key(
        False, "Where the evaluation data ends, go on with batches of padding, which carry no loss."
    )


@dataclass(frozen=True, kw_only=True)
class Config(RunKeys, DataKeys, LoaderKeys, EvaluationKeys):
    """A complete, valid configuration."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_interval > 0 and self.dataset_type == "network" and not self.network_eval_files:
            raise PingLlmError(
                f"eval_interval is {self.eval_interval}, but network_eval_files is empty: "
                "name the evaluation data, or set eval_interval to -1"
            )

    def replace(self, **changes: Any) -> Self:
        """The same with some keys changed, checked again."""
        for name in changes:
            find_key(name)
        return dataclasses.replace(self, **changes)

    def to_yaml(self) -> str:
        """Every key with its value, as a file that loads to an equal configuration."""
        values = {info.name: getattr(self, info.name) for info in describe_keys()}
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=math.inf)


@functools.cache
def describe_keys() -> tuple[KeyInfo, ...]:
    """All keys, in the order of the sections."""
    return Config.describe()


def find_key(name: str) -> KeyInfo:
    """The key of that name, or an error that names the nearest ones."""
    found = {info.name: info for info in describe_keys()}
    if name not in found:
        raise unknown_key(name, found)
    return found[name]
