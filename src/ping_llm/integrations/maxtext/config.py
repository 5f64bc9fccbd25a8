"""The keys that `dataset_type=network` adds to MaxText's configuration. Type, default, help and rule are our own."""

from pathlib import Path
from typing import Annotated, Any, Final

from maxtext.configs import types
from pydantic import AfterValidator, Field, create_model, model_validator

from ping_llm.config import KEYS, check_value
from ping_llm.core.errors import PingLlmError
from ping_llm.tokens import VOCABULARY_SIZE

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


# MaxText's configuration with our keys: a subclass of its own, for `pyconfig.initialize`.
#
# `dataset_type=network` is known to MaxText as `grain`, because only iterators of that type are saved in its
# checkpoints; `network_enabled` tells the two apart. This module imports MaxText: only the launcher may import it.


def _field(name: str) -> Any:
    def checked(value: Any) -> Any:
        try:
            return check_value(name, value)
        except PingLlmError as error:
            raise ValueError(str(error)) from None

    key = KEYS[name]
    return Annotated[key.annotation, AfterValidator(checked)], Field(key.default, description=key.description)


_WithNetworkKeys: Any = create_model(
    "_WithNetworkKeys", __base__=types.MaxTextConfig, **{name: _field(name) for name in NETWORK_KEYS}
)


class NetworkConfig(_WithNetworkKeys):  # type: ignore[misc]
    """All keys of MaxText, and those of `dataset_type=network`."""

    network_enabled: bool = Field(False, description="Set by the engine: whether dataset_type is network.")

    @model_validator(mode="before")
    @classmethod
    def _network_is_a_kind_of_grain(cls, values: dict[str, Any]) -> dict[str, Any]:
        is_network = values.get("dataset_type") == "network"
        values = {**values, "network_enabled": is_network}
        folder = str(values.get("base_output_directory") or "")
        if folder and "://" not in folder:  # MaxText's checkpoints want the whole path
            values["base_output_directory"] = str(Path(folder).absolute())
        if not is_network:
            if values.get("grain_visualization_dir"):
                raise ValueError("grain_visualization_dir is for dataset_type=network: Grain itself writes no graph")
            return values
        if problem := _problem(values):
            raise ValueError(problem)
        # MaxText wants to see files of its own before it believes in a grain dataset.
        return values | {
            "dataset_type": "grain",
            "grain_file_type": "arrayrecord",
            "grain_train_files": values["network_train_files"],
            "grain_eval_files": values.get("network_eval_files", ""),
        }


def _problem(values: dict[str, Any]) -> str | None:
    """What cannot go together with network data, with the reason."""
    factor = values.get("expansion_factor_real_data", -1)
    if not values.get("network_train_files"):
        return "dataset_type=network needs network_train_files: a folder that `ping-llm prepare` wrote"
    if values.get("eval_interval", -1) > 0 and not values.get("network_eval_files"):
        return "eval_interval is set, but network_eval_files is empty: name the evaluation data, or set it to -1"
    if values.get("attention") == "cudnn_flash_jax":
        return (
            "attention=cudnn_flash_jax ignores where segments end, so packed contexts would see each other; "
            "use autoselected, flash, cudnn_flash_te or dot_product"
        )
    if not values.get("packing", True):
        return "packing=false: batches of dataset_type=network are always packed"
    if not values.get("enable_data_shuffling", True):
        return "enable_data_shuffling=false: the order of dataset_type=network is always a seeded permutation"
    if values.get("vocab_size", VOCABULARY_SIZE) < VOCABULARY_SIZE:
        return f"vocab_size must be at least {VOCABULARY_SIZE}, the tokens of dataset_type=network"
    if 0 < factor < 1:
        return "expansion_factor_real_data below 1 is not needed: dataset_type=network resumes on any number of hosts"
    if values.get("colocated_python_data_input"):
        return "colocated_python_data_input is not supported by dataset_type=network"
    return None
