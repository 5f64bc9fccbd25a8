"""The keys there are, section by section, what the value of each may be, and `Config`, which has them all.

To add a key: declare it in a section here (or in a new `Section`, which then becomes a base of `Config`), and run
`make config-page`. Loading, checking, storing and documenting it follows.
The names are MaxText's wherever MaxText has the same thing, so that its commands work here.

A key is a field of a pydantic model, `Section`. pydantic checks its type; a `Rule` in its annotation says the rest:
`steps: Annotated[int, at_least(1)]`. Whatever is wrong becomes one `PingLlmError` that names the key, what it must be,
and what it was.
"""

import difflib
import functools
import math
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, ClassVar, Final, NamedTuple, Self

import pydantic
import yaml
from pydantic import field_validator, model_validator
from pydantic.fields import FieldInfo

from ping_llm.config.blends import parse_blend, parse_schedule, parse_steps
from ping_llm.core.errors import PingLlmError, shown

TYPE_NAMES: Final[dict[Any, str]] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    int | float: "a number",
    str: "text",
    str | int: "text or an integer",
}
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
MAX_DIGITS: Final = 18
"""Of an integer, so that it fits 64 bits wherever it goes."""


class Rule(NamedTuple):
    """A condition on a value, for `Annotated`. `text` completes the sentence "must be …"; `accepts` may raise an error
    that says more."""

    text: str
    accepts: Callable[[Any], bool]

    def or_else(self, special: float) -> "Rule":
        """Accept one value more, which has a meaning of its own (-1, most often). The help says which."""
        return Rule(f"{self.text}, or {special}", lambda value: value == special or self.accepts(value))


def at_least(least: float, *, up_to: float = math.inf) -> Rule:
    text = f"at least {least}" if up_to == math.inf else f"from {least} to {up_to}"
    return Rule(text, lambda value: least <= value <= up_to)


def above(bound: float) -> Rule:
    return Rule(f"above {bound}", lambda value: value > bound)


def one_of(*choices: str) -> Rule:
    return Rule(f"one of {', '.join(choices)}", lambda value: value in choices)


def key(default: Any, help: str) -> Any:
    """Declare a key of a section: `steps: Count = key(5_000, "Training steps of the run.")`."""
    return pydantic.Field(default, description=help)


class Section(pydantic.BaseModel):
    """Base of the models that declare keys. Its name and its docstring introduce the keys in the documentation."""

    model_config = pydantic.ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    noun: ClassVar[str] = "key"
    where_listed: ClassVar[str] = ""
    max_digits: ClassVar[int] = MAX_DIGITS

    @model_validator(mode="before")
    @classmethod
    def _keys_exist(cls, values: dict[str, Any]) -> dict[str, Any]:
        for name in values:
            if name not in cls.model_fields:
                raise cls.unknown(name)
        return values

    @classmethod
    def unknown(cls, name: str) -> PingLlmError:
        """The error for a key that is not there: it names the nearest ones."""
        likely, known = name.lower().replace("-", "_"), list(cls.model_fields)
        containing = [candidate for candidate in known if likely in candidate]  # `batch_size`: per_device_batch_size
        near = difflib.get_close_matches(likely, known, n=3, cutoff=0.7) or (containing if len(containing) <= 3 else [])
        advice = f"did you mean {' or '.join(near)}?" if near else cls.where_listed or f"there are {', '.join(known)}"
        return PingLlmError(f"unknown {cls.noun} {shown(name)}: {advice}")

    @field_validator("*", mode="wrap")
    @classmethod
    def _refuse_in_one_line(cls, value: Any, check: Callable[[Any], Any], info: pydantic.ValidationInfo) -> Any:
        field, what = cls.model_fields[info.field_name or ""], None
        if type(value) is int and abs(value) >= 10**cls.max_digits:
            what = f"a number of at most {cls.max_digits} digits"
        elif isinstance(value, str) and _CONTROL.search(value):
            what = "text without line breaks and other control characters"
        else:
            try:
                value = check(value)
                rules = (rule for rule in field.metadata if isinstance(rule, Rule))
                what = next((rule.text for rule in rules if not rule.accepts(value)), None)
            except PingLlmError as error:
                raise PingLlmError(f"{info.field_name}: {error}") from None
            except ValueError:
                what = TYPE_NAMES[field.annotation]
        if what is None:
            return value
        raise PingLlmError(f"{info.field_name} must be {what}, not {shown(value)}")


# The keys.

DATASET_TYPES: Final = {
    "network": "network",
    "grain": "grain",
    "hf": "hf",
    "tfds": "tfds",
    "c4_mlperf": "tfds",
    "synthetic": "synthetic",
    "worlds": "completer",
    "measured": "completer",
}
"""The backends that come with the package, and the module of `ping_llm.data` that serves each."""

COMPLETER_DATA: Final = ("worlds", "measured")
"""Those that the completer is trained on."""

TEXT_DATASET_TYPES: Final = ("grain", "hf", "tfds", "c4_mlperf")
"""Those of them that need a tokenizer."""

RANDOM_ACCESS_TYPES: Final = ("arrayrecord", "tokens")
"""Of `grain_file_type`, those that give any document by its number."""

BACKEND_ENTRY_POINTS: Final = "ping_llm.backends"
"""Entry points of this group are backends of other packages; docs/backends.md says what they must offer."""

SECRETS: Final = ("hf_access_token",)
"""Keys whose values are not stored with a run."""

MAXTEXT_ONLY: Final = ("generate_padding_batch_train", "generate_padding_batch_eval", "expansion_factor_real_data")
"""Keys that mean something to the MaxText trainer alone: here they may only have their default."""


@functools.cache
def installed_backends() -> dict[str, EntryPoint]:
    """The backends of other packages, by the name that `dataset_type` calls them."""
    return {entry.name: entry for entry in entry_points(group=BACKEND_ENTRY_POINTS) if entry.name not in DATASET_TYPES}


Count = Annotated[int, at_least(1)]
CountOrZero = Annotated[int, at_least(0)]
CountOrMinusOne = Annotated[int, at_least(1).or_else(-1)]
Seed = Annotated[int, at_least(0, up_to=2**32 - 1)]
Positive = Annotated[float, above(0)]
NonNegative = Annotated[float, at_least(0)]
Share = Annotated[float, at_least(0, up_to=1)]
Dtype = Annotated[str, one_of("bfloat16", "float32")]
FolderName = Annotated[
    str, Rule("a plain folder name", lambda name: not set(name) & set("/\\") and name not in (".", ".."))
]
Column = Annotated[str, Rule("the name of one column", lambda name: not name.startswith("["))]
TextFiles = Annotated[str, Rule("a pattern or a blend", lambda text: not text or bool(parse_blend(text)))]
Schedule = Annotated[str, Rule("STEP: weights; …", lambda text: parse_schedule(text) is not None)]
Steps = Annotated[str, Rule("FIRST:END,…", lambda text: parse_steps(text) is not None)]
RowFiles = Annotated[str, Rule("a folder, a pattern or a blend", lambda text: not text or bool(parse_blend(text)))]
DatasetType = Annotated[
    str, Rule(one_of(*DATASET_TYPES).text, lambda name: name in DATASET_TYPES or name in installed_backends())
]


class Run(Section):
    """What the run is called, where its output goes, and how long it lasts."""

    project: FolderName = key("ping-llm", "Folder that holds the runs that belong together; also W&B's project.")
    run_name: FolderName = key("", "Name of the run, and of its folder; empty = made from the time of the start.")
    base_output_directory: Annotated[str, Rule("a folder", bool)] = key("runs", "Folder that holds the projects.")
    steps: Count = key(5_000, "Training steps of the whole run, those before a resume included.")
    allow_data_change: bool = key(False, "Permit resuming a run with other data or other data settings.")


class Data(Section):
    """What is learned from. These and the number of devices decide every training batch; nothing else does."""

    dataset_type: DatasetType = key(
        "network",
        "Where batches come from: `network` (probe rows), `synthetic` (random tokens); text by `grain`, `hf`, `tfds` "
        "or `c4_mlperf`; for the completer `worlds` (simulated Internets) or `measured` (measurement files).",
    )
    network_data_format: Annotated[str, one_of("probe_chunks", "network_parquet")] = key(
        "probe_chunks",
        "`probe_chunks` = probe rows of `ping-llm prepare`; `network_parquet` = measurement files, unprepared.",
    )
    network_train_files: RowFiles = key("", "Training data: a prepared folder, a pattern of its shards, or a blend.")
    network_eval_files: RowFiles = key("", "Evaluation data, written likewise; of a folder, its evaluation split.")
    network_context_measurements: Count = key(30, "A row gives one context for every so many measurements.")
    network_max_contexts: Count = key(16, "A row gives at most so many contexts per epoch.")
    network_result_last: Share = key(
        0.0, "Share of contexts in which every measurement ends with its result, as in a question; else any order."
    )
    network_skip_corrupt_rows: bool = key(False, "true = skip and count unreadable rows; false = stop at the first.")
    data_cache_dir: str = key(
        "",
        "Where copies of rows in object stores, and lengths of documents, are; empty = in the user's cache folder.",
    )
    data_cache_gb: NonNegative = key(0.0, "Disk space for such copies; 0 = half of what is free.")
    data_shuffle_seed: Seed = key(0, "Seed of the order and of all sampling.")
    mixture_schedule: Schedule = key(
        "", "Other weights of the blend from a step on: `20_000: 0.2,0.5,0.3; 40_000: 1,0,0`; may change on resume."
    )
    skip_steps: Steps = key("", "Planned steps to pass over, as after a loss spike: `10_240:10_260,11_000:11_004`.")
    per_device_batch_size: Positive = key(8.0, "Sequences per device and step; a fraction, if all have a whole number.")
    eval_per_device_batch_size: NonNegative = key(0.0, "The same of evaluation; 0 = as in training.")
    # The longest measurement (IPv6, absolute time) has 47 tokens: each fits the shortest sequence.
    max_target_length: Annotated[int, at_least(64)] = key(1024, "Tokens of a sequence.")
    generate_padding_batch_train: bool = key(
        False, "MaxText trainer only: where the training data ends, continue with padding, which carries no loss."
    )


class Text(Section):
    """Which documents are read, for the text backends; docs/backends.md says what each of them promises."""

    grain_file_type: Annotated[str, one_of("arrayrecord", "parquet", "tfrecord", "tokens")] = key(
        "arrayrecord", "`grain`: format of its files; `tokens` = tokenised documents (.bin with .idx, or .arrow)."
    )
    grain_train_files: TextFiles = key("", "`grain`: pattern of the training files, or a blend (ArrayRecord, tokens).")
    grain_train_mixture_config_path: str = key(
        "", '`grain`: a blend as JSON instead, `{"name": {"path": pattern, "weight": number}}`; may change on resume.'
    )
    grain_eval_files: TextFiles = key("", "`grain`: pattern of the evaluation files.")
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
    train_data_columns: Column = key("text", "Column or feature that holds the text of a training document.")
    eval_data_columns: Column = key("text", "The same of evaluation documents.")
    skip_documents: str = key(
        "",
        "`grain`, arrayrecord, tokens: file of documents to leave out, a line `FILE NUMBER` as in `inspect batch`.",
    )
    num_epoch: CountOrMinusOne = key(-1, "Epochs of the training text; -1 = without end.")
    enable_data_shuffling: bool = key(True, "false = documents come in the order of their files, every epoch the same.")
    shuffle_window: Count = key(4096, "Documents shuffled together, where data is read in order.")
    max_segments_per_seq: CountOrMinusOne = key(
        -1, "Of text that is read in order: documents that share a sequence, at most. -1 = one for each 32 tokens."
    )


class Tokenizer(Section):
    """How text becomes tokens, for `dataset_type=grain`, `hf`, `tfds` and `c4_mlperf`."""

    tokenizer_type: Annotated[str, one_of("sentencepiece", "huggingface", "tiktoken")] = key(
        "sentencepiece", "What tokenizer_path is."
    )
    tokenizer_path: str = key(
        "", "SentencePiece model; folder with a `tokenizer.json` (or a name on the Hub); tiktoken file or encoding."
    )
    vocab_size: CountOrZero = key(0, "Tokens that the model knows, at least the tokenizer's; 0 = those of the data.")
    add_bos: bool = key(True, "Begin each document with the tokenizer's token for that, if it has one.")
    add_eos: bool = key(True, "End each document with the tokenizer's token for that, if it has one.")


class Worlds(Section):
    """Simulated Internets ("worlds"), which train the completer (`dataset_type=worlds`), one for each sequence."""

    worlds_context: Annotated[int, at_least(8)] = key(1024, "Measurements that a context holds at most.")
    worlds_questions: Count = key(256, "Queries per world.")
    worlds_most_nodes: Annotated[int, at_least(4)] = key(400, "Nodes of the largest worlds.")
    measured_share: Share = key(0.5, "`measured`: share of the contexts that come from real measurements.")
    completer_identity: Annotated[int, at_least(4)] = key(128, "Length of the random vectors that identify nodes.")


class Loader(Section):
    """How batches are made: these change the speed and the memory, never the content of a training batch."""

    grain_worker_count: Annotated[int, at_least(-1)] = key(
        -1, "Worker processes; -1 = chosen from the cores and the RAM budget, 0 = none, in-process."
    )
    grain_per_worker_buffer_size: CountOrMinusOne = key(-1, "Batches a worker holds ready; -1 = as the budget allows.")
    grain_ram_budget_mb: Count = key(4096, "Memory of workers and their buffers together, where -1 lets us choose.")
    grain_debug_mode: bool = key(False, "Log time per stage, waiting and the bottleneck, every minute and at the end.")
    grain_visualization_dir: str = key("", "Folder for the graph of the pipeline (SVG) and its numbers; empty = none.")
    expansion_factor_real_data: Annotated[float, above(0).or_else(-1)] = key(
        -1.0, "MaxText trainer only: -1 = every host loads data; k > 1 = one host in k does."
    )


class Evaluation(Section):
    """When the model is evaluated in training, and on how much."""

    eval_interval: CountOrMinusOne = key(-1, "Training steps from one evaluation to the next; -1 = never.")
    eval_steps: CountOrMinusOne = key(-1, "Batches of an evaluation, at most; -1 = all of the evaluation data.")
    generate_padding_batch_eval: bool = key(
        False, "MaxText trainer only: where the evaluation data ends, continue with padding, which carries no loss."
    )


class Model(Section):
    """The shape of the model. The defaults are `latency_network`: 112 M parameters."""

    base_num_decoder_layers: Count = key(20, "Layers.")
    base_emb_dim: Annotated[int, at_least(8)] = key(640, "Width of the residual stream.")
    base_num_query_heads: Count = key(10, "Attention heads of a layer.")
    head_dim: Annotated[int, Rule("even and above 0", lambda n: n > 0 and n % 2 == 0)] = key(64, "Size of a head.")
    base_mlp_dim: Count = key(2048, "Width of the gated MLP (SwiGLU).")
    use_qk_norm: bool = key(False, "RMSNorm of queries and keys before attention.")
    byte_features: CountOrZero = key(
        0, "Cosines of a byte's value that embedding and head have beside the token; 0 = none. For probe rows."
    )
    rope_max_timescale: Annotated[float, above(1)] = key(10_000.0, "Longest period of the rotary positions (RoPE).")
    final_logits_soft_cap: NonNegative = key(0.0, "Squeeze logits into ± this; 0 = not.")
    dtype: Dtype = key("bfloat16", "Of activations and matmuls.")
    weight_dtype: Dtype = key("float32", "Of the weights that the optimizer holds.")
    quantization: Annotated[str, one_of("none", "fp8", "auto")] = key(
        "none",
        "`fp8` = the language model trains with FP8 matmuls, `auto` = on GPUs that have them (Hopper and newer); "
        "evaluation and prediction use `dtype`.",
    )
    attention: Annotated[str, one_of("auto", "plain", "cudnn")] = key(
        "auto", "`cudnn` = packed layout (Hopper and newer), `plain` = masked, anywhere."
    )
    remat_policy: Annotated[str, one_of("none", "full")] = key(
        "none", "`full` = keep only each layer's input and compute the rest again: less memory."
    )
    init_weights_seed: Seed = key(0, "Seed of the first weights.")
    load_parameters_path: str = key("", "Run or exported model whose weights a new run begins with; empty = none.")


class Optimizer(Section):
    """How the weights are changed."""

    opt_type: Annotated[str, one_of("adamw", "muon")] = key(
        "muon", "`muon` = Muon for the matrices of the layers, AdamW for the rest."
    )
    learning_rate: Positive = key(4e-3, "The highest learning rate. AdamW alone needs 1e-3.")
    learning_rate_schedule: Annotated[str, one_of("cosine", "wsd")] = key(
        "wsd", "After the warm-up: `cosine`, or `wsd` = constant, then a linear decay."
    )
    warmup_steps_fraction: Share = key(0.05, "Share of the steps in which the rate rises.")
    decay_steps_fraction: Share = key(0.3, "Share of the steps of the decay (wsd).")
    learning_rate_final_fraction: Share = key(0.1, "The last learning rate, as a share.")
    adam_b1: Share = key(0.9, "Decay of the mean of gradients.")
    adam_b2: Share = key(0.95, "Decay of the mean of squared gradients.")
    adam_eps: Positive = key(1e-8, "Added to the root of the mean square.")
    adam_weight_decay: NonNegative = key(0.1, "Decoupled weight decay, of all but the embedding.")
    muon_beta: Share = key(0.95, "Momentum of Muon.")
    gradient_clipping_threshold: NonNegative = key(1.0, "Largest norm of the gradient; 0 = no clipping.")
    gradient_accumulation_steps: Count = key(1, "Parts of a batch, computed one after the other to save memory.")
    average_decay: Share = key(
        0.0, "Decay per step of a running average of the weights, which is then what is evaluated and used; 0 = none."
    )
    rtt_loss_weight: Positive = key(1.0, "Weight in the loss of the bytes of RTTs, where every other token counts 1.")
    z_loss_multiplier: NonNegative = key(0.0, "Weight of the squared log of the normaliser in the loss.")


class Hardware(Section):
    """Which devices take part, and how they share the work."""

    distributed: bool = key(
        False, "Several processes, joined by JAX_COORDINATOR_ADDRESS etc. or by their launcher: docs/multihost.md."
    )
    ici_data_parallelism: CountOrMinusOne = key(-1, "Devices that hold copies of the weights; -1 = all that are left.")
    ici_fsdp_parallelism: Count = key(1, "Devices that share one copy of weights and optimizer.")
    peak_tflops: NonNegative = key(0.0, "Peak TFLOP/s of a device, for the MFU (utilisation); 0 = by its name.")


class Checkpoints(Section):
    """When the run is saved."""

    enable_checkpointing: bool = key(True, "false = the run cannot be resumed or used.")
    checkpoint_period: Count = key(500, "Steps from one checkpoint to the next; the end is always saved.")
    async_checkpointing: bool = key(True, "Write while training continues.")
    max_num_checkpoints_to_keep: Count = key(2, "Newest checkpoints that are kept.")
    keep_best_checkpoints: CountOrZero = key(1, "Checkpoints of the lowest evaluation loss that are kept as well.")


class Metrics(Section):
    """What is reported, and where."""

    log_period: Count = key(10, "Steps between lines in the log, in TensorBoard and in W&B.")
    enable_tensorboard: bool = key(True, "Write TensorBoard files, if tensorboardX is installed.")
    wandb_mode: Annotated[str, one_of("off", "offline", "online")] = key("off", "Weights & Biases.")
    profile_steps: Annotated[
        str, Rule("empty, or first:end", lambda text: not text or bool(re.fullmatch(r"\d+:\d+", text)))
    ] = key("", "Steps of which a JAX trace is written, as first:end.")


class Config(Run, Data, Text, Tokenizer, Worlds, Loader, Evaluation, Model, Optimizer, Hardware, Checkpoints, Metrics):
    """A complete, valid configuration."""

    where_listed: ClassVar[str] = "`python -m ping_llm.config` lists the keys there are"

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        if self.eval_interval > 0 and self.dataset_type == "network" and not self.network_eval_files:
            raise PingLlmError(
                f"eval_interval is {self.eval_interval}, but network_eval_files is empty: "
                "name the evaluation data, or set eval_interval to -1"
            )
        if not self.enable_data_shuffling and self.dataset_type not in TEXT_DATASET_TYPES:
            raise PingLlmError(
                f"enable_data_shuffling=false is for text ({', '.join(TEXT_DATASET_TYPES)}), "
                f"not for dataset_type={self.dataset_type}"
            )
        is_planned_text = self.dataset_type == "grain" and self.grain_file_type in RANDOM_ACCESS_TYPES
        grain = f"grain with grain_file_type={' or '.join(RANDOM_ACCESS_TYPES)}"
        for name in ("mixture_schedule", "skip_steps"):
            if getattr(self, name) and not is_planned_text and self.dataset_type != "network":
                raise PingLlmError(
                    f"{name} needs batches that are a function of their step: dataset_type=network, or {grain}"
                )
        if self.skip_documents and not is_planned_text:
            raise PingLlmError(f"skip_documents is for {grain}: make token files of other text with ping-llm tokenize")
        for name in MAXTEXT_ONLY:
            if getattr(self, name) != KEYS[name].default:
                raise PingLlmError(
                    f"{name} is for the MaxText trainer (docs/maxtext.md); here, leave it at its default"
                )
        return self

    @property
    def shuffle_seed(self) -> int | None:
        """Of the order of documents; None = that of their files."""
        return self.data_shuffle_seed if self.enable_data_shuffling else None

    def replace(self, **changes: Any) -> Self:
        """The same with some keys changed, checked again."""
        return type(self)(**self.model_dump() | changes)

    def to_store(self) -> dict[str, Any]:
        """Every key with its value, as it may be shown to anybody: without secrets."""
        return {name: getattr(self, name) for name in KEYS} | dict.fromkeys(SECRETS, "")

    def to_yaml(self) -> str:
        """The same as a file, which loads to an equal configuration."""
        return yaml.safe_dump(self.to_store(), sort_keys=False, allow_unicode=True, width=math.inf)


SECTIONS: Final = tuple(base for base in Config.__bases__ if issubclass(base, Section))

KEYS: Final[dict[str, FieldInfo]] = {
    name: field for section in SECTIONS for name, field in section.model_fields.items()
}
"""Every key with its type, default, help (`description`) and rule (`metadata`), in the order of the sections."""
