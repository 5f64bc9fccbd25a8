"""The keys of the text backends. Their names are those of MaxText's guide, so that its commands work here."""

from dataclasses import dataclass
from typing import ClassVar

from ping_llm.config.blend import parse_blend
from ping_llm.config.keys import Rule, Section, at_least, key, one_of

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
