"""The keys that `dataset_type=network` adds to MaxText's configuration. Type, default, help and rule are our own."""

from typing import Final

NETWORK_KEYS: Final = (
    "network_data_format",
    "network_train_files",
    "network_eval_files",
    "network_context_measurements",
    "network_max_contexts",
    "network_skip_corrupt_rows",
    "allow_data_change",
    "grain_debug_mode",
    "grain_visualization_dir",
)
