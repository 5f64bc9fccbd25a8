"""The keys of the text backends. Their names are those of MaxText's guide, so that its commands work here."""

import dataclasses
import functools
import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import yaml

from ping_llm.config.blend import parse_blend
from ping_llm.config.keys import (
    DATASET_TYPES,
    KeyInfo,
    Rule,
    Section,
    above,
    at_least,
    is_dataset_type,
    key,
    one_of,
    unknown_key,
)
from ping_llm.core.errors import PingLlmError

SECRETS = ("hf_access_token",)
"""Keys whose values are not stored with a run."""

_BLEND = Rule("a pattern or a blend", lambda text: not text or bool(parse_blend(text)))


@dataclass(frozen=True, kw_only=True)
class TokenizerKeys(Section):
    """How text becomes tokens, for `dataset_type=grain`, `hf`, `tfds` and `c4_mlperf`."""

    title: ClassVar[str] = "Tokenizer"

    tokenizer_type: str = key(
        "sentencepiece", "What tokenizer_path is.", one_of("sentencepiece", "huggingface", "tiktoken")
    )
    tokenizer_path: str = key(
        "", "SentencePiece model; folder with a `tokenizer.json` (or a name on the Hub); tiktoken file or encoding."
    )
    vocab_size: int = key(
        0, "Tokens that the model knows, at least those of the tokenizer; 0 = just those of the data.", at_least(0)
    )
    add_bos: bool = key(True, "Begin each document with the tokenizer's token for that, if it has one.")
    add_eos: bool = key(True, "End each document with the tokenizer's token for that, if it has one.")


@dataclass(frozen=True, kw_only=True)
class TextKeys(Section):
    """Which documents are read, for the same backends; docs/backends.md says what each of them promises."""

    title: ClassVar[str] = "Text"

    grain_file_type: str = key(
        "arrayrecord", "`grain`: format of its files.", one_of("arrayrecord", "parquet", "tfrecord")
    )
    grain_train_files: str = key("", "`grain`: pattern of the training files, or a blend of ArrayRecord files.", _BLEND)
    grain_train_mixture_config_path: str = key(
        "", '`grain`: a blend as JSON instead, `{"name": {"path": pattern, "weight": number}}`; may change on resume.'
    )
    grain_eval_files: str = key("", "`grain`: pattern of the evaluation files.", _BLEND)
    hf_path: str = key("", "`hf`: `json`, `parquet`, `arrow`, `csv` or `text` for files, or a dataset of the Hub.")
    hf_name: str = key("", "`hf`: configuration of a dataset of the Hub.")
    hf_data_dir: str = key("", "`hf`: folder within a dataset of the Hub.")
    hf_train_files: str = key("", "`hf`: pattern of the training files.")
    hf_train_split: str = key("train", "`hf`: split of a dataset of the Hub.")
    hf_eval_files: str = key("", "`hf`: pattern of the evaluation files.")
    hf_eval_split: str = key("", "`hf`: evaluation split of a dataset of the Hub.")
    hf_access_token: str = key("", "`hf`: for gated datasets and tokenizers; never stored. HF_TOKEN works, too.")
    dataset_path: str = key("", "`tfds`, `c4_mlperf`: folder that holds the datasets.")
    dataset_name: str = key("c4/en:3.0.1", "`tfds`, `c4_mlperf`: training dataset and its version.")
    train_split: str = key("train", "`tfds`, `c4_mlperf`: split to train on.")
    eval_dataset_name: str = key("c4/en:3.0.1", "`tfds`, `c4_mlperf`: evaluation dataset and its version.")
    eval_split: str = key("validation", "`tfds`, `c4_mlperf`: split to evaluate on.")
    train_data_columns: str = key("text", "Column or feature that holds the text of a training document.")
    eval_data_columns: str = key("text", "The same of evaluation documents.")
    num_epoch: int = key(-1, "Times that the training text is gone through; -1 = without end.", at_least(1, or_else=-1))
    shuffle_window: int = key(
        4096, "Documents that are shuffled together, where data is read in order (all but ArrayRecord).", at_least(1)
    )
    max_segments_per_seq: int = key(
        -1,
        "Documents that share a sequence, at most; the rest of it is padding. -1 = one for each 32 tokens.",
        at_least(1, or_else=-1),
    )


# The keys there are, section by section, and `Config`, which has them all.
#
# To add keys: declare them in a section here (or in a new `Section`, which then becomes a base of `Config`), and run
# `python -m ping_llm.config docs/configuration.md`. Loading, checking, storing and documenting them follows.

_NOT_EMPTY = Rule("a folder", bool)
_RUN_NAME = Rule("a plain folder name", lambda name: not set(name) & set("/\\") and name not in (".", ".."))
_STEP_RANGE = Rule("empty, or first:end", lambda text: not text or bool(re.fullmatch(r"\d+:\d+", text)))
_FILES = Rule("a folder, a pattern or a blend", lambda text: not text or bool(parse_blend(text)))


@dataclass(frozen=True, kw_only=True)
class RunKeys(Section):
    """What the run is called, where its output goes, and how long it lasts."""

    title: ClassVar[str] = "Run"

    project: str = key("ping-llm", "Folder that holds the runs that belong together; also W&B's project.", _RUN_NAME)
    run_name: str = key("", "Name of the run, and of its folder; empty = made from the time of the start.", _RUN_NAME)
    base_output_directory: str = key("runs", "Folder that holds the projects.", _NOT_EMPTY)
    steps: int = key(5_000, "Training steps of the whole run, those before a resume included.", at_least(1))
    allow_data_change: bool = key(False, "Permit resuming a run with other data or other data settings.")


@dataclass(frozen=True, kw_only=True)
class DataKeys(Section):
    """What is learnt from. These and the number of devices decide every training batch; nothing else does."""

    title: ClassVar[str] = "Data"

    dataset_type: str = key(
        "network",
        "Where batches come from: `network` (probe rows), `synthetic` (random tokens); text by `grain`, `hf`, `tfds` "
        "or `c4_mlperf`; for the completer `worlds` (simulated Internets) or `measured` (measurement files).",
        Rule(f"one of {', '.join(DATASET_TYPES)}", is_dataset_type),  # or of an installed package
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
    data_cache_dir: str = key("", "Where copies of rows in object stores are kept; empty = in the user's cache folder.")
    data_cache_gb: float = key(0.0, "Disk space for such copies; 0 = half of what is free.", at_least(0))
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
class WorldKeys(Section):
    """Simulated worlds, which train the completer (`dataset_type=worlds`). A batch has a world for each sequence."""

    title: ClassVar[str] = "Worlds"

    worlds_context: int = key(512, "Measurements that a context holds at most.", at_least(8))
    worlds_questions: int = key(128, "Questions asked of each world.", at_least(1))
    worlds_most_nodes: int = key(400, "Nodes of the largest worlds.", at_least(4))
    measured_share: float = key(
        0.5, "`measured`: share of the contexts that come from real measurements.", at_least(0, up_to=1)
    )
    completer_identity: int = key(128, "Length of the random vectors that stand for nodes.", at_least(4))


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
class ModelKeys(Section):
    """The shape of the model. The defaults are `latency_network`: 112 M parameters."""

    title: ClassVar[str] = "Model"

    base_num_decoder_layers: int = key(20, "Layers.", at_least(1))
    base_emb_dim: int = key(640, "Width of the residual stream.", at_least(8))
    base_num_query_heads: int = key(10, "Attention heads of a layer.", at_least(1))
    head_dim: int = key(64, "Size of a head; even.", Rule("even and above 0", lambda size: size > 0 and size % 2 == 0))
    base_mlp_dim: int = key(2048, "Width of the gated MLP.", at_least(1))
    rope_max_timescale: float = key(10_000.0, "Longest period of the rotary positions.", above(1))
    final_logits_soft_cap: float = key(0.0, "Squeeze logits into ± this; 0 = not.", at_least(0))
    dtype: str = key("bfloat16", "Of activations and matrix products.", one_of("bfloat16", "float32"))
    weight_dtype: str = key("float32", "Of the weights that the optimizer holds.", one_of("bfloat16", "float32"))
    quantization: str = key(
        "none",
        "`fp8` = the language model trains with products in 8 bits, `auto` = on GPUs with units for it (Hopper and "
        "newer); evaluation and prediction use `dtype`.",
        one_of("none", "fp8", "auto"),
    )
    attention: str = key(
        "auto",
        "`cudnn` = packed layout (Hopper and newer), `plain` = masked, anywhere.",
        one_of("auto", "plain", "cudnn"),
    )
    remat_policy: str = key(
        "none", "`full` = keep only each layer's input and compute the rest again: less memory.", one_of("none", "full")
    )
    init_weights_seed: int = key(0, "Seed of the first weights.", at_least(0, up_to=2**32 - 1))
    load_parameters_path: str = key("", "Run or exported model whose weights a new run begins with; empty = none.")


@dataclass(frozen=True, kw_only=True)
class OptimizerKeys(Section):
    """How the weights are changed."""

    title: ClassVar[str] = "Optimizer"

    opt_type: str = key(
        "muon", "`muon` = Muon for the matrices of the layers, AdamW for the rest.", one_of("adamw", "muon")
    )
    learning_rate: float = key(4e-3, "The highest learning rate. AdamW alone wants 1e-3.", above(0))
    learning_rate_schedule: str = key(
        "wsd", "After the warm-up: `cosine`, or `wsd` = constant, then a linear decay.", one_of("cosine", "wsd")
    )
    warmup_steps_fraction: float = key(0.05, "Share of the steps in which the rate rises.", at_least(0, up_to=1))
    decay_steps_fraction: float = key(0.3, "Share of the steps of the decay (wsd).", at_least(0, up_to=1))
    learning_rate_final_fraction: float = key(0.1, "The last learning rate, as a share.", at_least(0, up_to=1))
    adam_b1: float = key(0.9, "Decay of the mean of gradients.", at_least(0, up_to=1))
    adam_b2: float = key(0.95, "Decay of the mean of squared gradients.", at_least(0, up_to=1))
    adam_eps: float = key(1e-8, "Added to the root of the mean square.", above(0))
    adam_weight_decay: float = key(0.1, "Decoupled weight decay, of all but the embedding.", at_least(0))
    muon_beta: float = key(0.95, "Momentum of Muon.", at_least(0, up_to=1))
    gradient_clipping_threshold: float = key(1.0, "Largest norm of the gradient; 0 = no clipping.", at_least(0))
    gradient_accumulation_steps: int = key(
        1, "Parts in which a batch is computed one after the other, to save memory.", at_least(1)
    )
    average_decay: float = key(
        0.0,
        "Decay a step of a running average of the weights, which is then what is evaluated and used; 0 = none.",
        at_least(0, up_to=1),
    )
    z_loss_multiplier: float = key(0.0, "Weight of the squared log of the normaliser in the loss.", at_least(0))


@dataclass(frozen=True, kw_only=True)
class HardwareKeys(Section):
    """Which devices take part, and how they share the work."""

    title: ClassVar[str] = "Hardware"

    distributed: bool = key(
        False, "Several processes, joined by JAX_COORDINATOR_ADDRESS etc. or by their launcher: docs/multihost.md."
    )
    ici_data_parallelism: int = key(
        -1, "Devices that hold copies of the weights; -1 = all that are left.", at_least(1, or_else=-1)
    )
    ici_fsdp_parallelism: int = key(1, "Devices that share one copy of weights and optimizer.", at_least(1))
    peak_tflops: float = key(
        0.0, "Peak of a device for the utilisation (MFU), in TFLOP/s; 0 = known for common ones.", at_least(0)
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointKeys(Section):
    """When the run is saved."""

    title: ClassVar[str] = "Checkpoints"

    enable_checkpointing: bool = key(True, "false = the run cannot be resumed or used.")
    checkpoint_period: int = key(500, "Steps from one checkpoint to the next; the end is always saved.", at_least(1))
    async_checkpointing: bool = key(True, "Write while training goes on.")
    max_num_checkpoints_to_keep: int = key(2, "Newest checkpoints that are kept.", at_least(1))
    keep_best_checkpoints: int = key(1, "Checkpoints of the lowest evaluation loss that are kept as well.", at_least(0))


@dataclass(frozen=True, kw_only=True)
class MetricsKeys(Section):
    """What is reported, and where."""

    title: ClassVar[str] = "Metrics"

    log_period: int = key(10, "Steps between lines in the log, in TensorBoard and in W&B.", at_least(1))
    enable_tensorboard: bool = key(True, "Write TensorBoard files, if tensorboardX is installed.")
    wandb_mode: str = key("off", "Weights & Biases.", one_of("off", "offline", "online"))
    profile_steps: str = key("", "Steps of which a JAX trace is written, as first:end.", _STEP_RANGE)


@dataclass(frozen=True, kw_only=True)
class Config(
    RunKeys,
    DataKeys,
    TextKeys,
    TokenizerKeys,
    WorldKeys,
    LoaderKeys,
    EvaluationKeys,
    ModelKeys,
    OptimizerKeys,
    HardwareKeys,
    CheckpointKeys,
    MetricsKeys,
):
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

    def to_store(self) -> dict[str, Any]:
        """Every key with its value, as it may be shown to anybody: without secrets."""
        return {info.name: getattr(self, info.name) for info in describe_keys()} | dict.fromkeys(SECRETS, "")

    def to_yaml(self) -> str:
        """The same as a file, which loads to an equal configuration."""
        return yaml.safe_dump(self.to_store(), sort_keys=False, allow_unicode=True, width=math.inf)


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
