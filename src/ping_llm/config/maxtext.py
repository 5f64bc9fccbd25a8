"""Keys of MaxText 0.2.5 about data that we do not have: which values change nothing here, and what to use instead.

So a configuration written for MaxText can be loaded if it means the same here. A key whose value changes nothing is
skipped; any other value is an error of one line, so that nothing is silently ignored. docs/coming-from-maxtext.md lists
these keys, and those that both have.
"""

from typing import Any, Final

_PACKED = "sequences are always packed, and attention crosses documents in c4_mlperf only"
_READERS = "readers need no tuning: grain_worker_count and grain_ram_budget_mb are enough"
_SAME_WORKERS = "evaluation is read in the training process; grain_worker_count is for training"
_TOKENS = "documents that are tokenised already are grain_file_type=tokens"
_MEGATRON = "Megatron's indexed files are grain_file_type=tokens, and shuffled, packed and blended as all others"
_OLMO = "OLMo's files are not read; token files are grain_file_type=tokens"
_PRETRAINING = "text is for pre-training here; fine-tune with MaxText (docs/maxtext.md)"
_CONSTANT = "the batch size is the same for the whole run"
_HOSTS = "hosts share files as docs/backends.md says"

MAXTEXT_KEYS: Final[dict[str, tuple[Any, str]]] = {
    "packing": (True, _PACKED),
    "use_stream_chunking": (None, "c4_mlperf makes the sequences that MaxText makes where the key is not set"),
    "reset_attention_mask": (True, _PACKED),
    "grain_packing_type": (
        None,
        "ArrayRecord and tokens are packed best-fit; what is read in order is concatenated and then split",
    ),
    "use_truncation": (False, "a long document continues in the next sequence, and nothing is truncated"),
    "tokenize_train_data": (True, _TOKENS),
    "tokenize_eval_data": (True, f"{_TOKENS}, and of c4_mlperf an eval_split with `tokenized` in its name"),
    "max_corpus_chars": (10_000_000, "no tokenizer is trained here"),
    "grain_shuffle_buffer_size": (None, "documents are shuffled in windows of shuffle_window"),
    "grain_use_elastic_iterator": (False, "ArrayRecord text resumes on any number of hosts as it is"),
    "grain_worker_count_eval": (0, _SAME_WORKERS),
    "grain_per_worker_buffer_size_eval": (1, _SAME_WORKERS),
    "grain_num_threads": (16, _READERS),
    "grain_prefetch_buffer_size": (500, _READERS),
    "grain_num_threads_eval": (16, _READERS),
    "grain_prefetch_buffer_size_eval": (500, _READERS),
    "grain_data_source_max_workers": (16, _READERS),
    "grain_index_storage_option": (None, _READERS),
    "train_shard_in_read": (False, _HOSTS),
    "train_interleave_cycle_length": (-1, _HOSTS),
    "mmap_eod_id": (0, _MEGATRON),
    "mmap_npy_split": ("", _MEGATRON),
    "mmap_split_sentences": (False, _MEGATRON),
    "blend_cache_dir": ("", _MEGATRON),
    "blend_index_dir": ("", _MEGATRON),
    "eod_mask_loss": (False, _MEGATRON),
    "packing_max_segments_per_sample": (25, _MEGATRON),
    "olmo_index_path": ("", _OLMO),
    "olmo_path_remap_from": ("", _OLMO),
    "olmo_path_remap_to": ("", _OLMO),
    "olmo_apply_ngram_filter": (True, _OLMO),
    "train_image_column": ("image", _PRETRAINING),
    "eval_image_column": ("image", _PRETRAINING),
    "default_prompt": ("", _PRETRAINING),
    "use_chat_template": (False, _PRETRAINING),
    "chat_template": ("", _PRETRAINING),
    "chat_template_path": ("", _PRETRAINING),
    "data_template_path": ("", _PRETRAINING),
    "use_sft": (False, _PRETRAINING),
    "sft_train_on_completion_only": (False, _PRETRAINING),
    "use_dpo": (False, _PRETRAINING),
    "enable_rampup_batch_size": (False, _CONSTANT),
    "per_device_batch_size_start": (4.0, _CONSTANT),
    "per_device_batch_size_increment": (2.0, _CONSTANT),
    "global_rampup_samples": (500, _CONSTANT),
    "reuse_example_batch": (0, "dataset_type=synthetic trains without reading data"),
    "colocated_python_data_input": (False, "hosts read their own data"),
    "eval_start_step": (0, "evaluation begins with the first eval_interval"),
}
"""For each key, the value that changes nothing (None = there is none), and what to use instead of other values."""
