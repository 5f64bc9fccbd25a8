"""Where the engine takes hold of MaxText, checked before anything is touched.

MaxText has no plug-in mechanism. Four of its names are replaced for the time of a run: the one that reads the
configuration, so that it knows our keys; the two that make Grain iterators, so that `network` gets ours; and the one
that looks for orphaned worker processes, because it ends those of everybody on the machine.
"""

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from ping_llm.engines.maxtext import iterators
from ping_llm.engines.maxtext.architecture import NOTE, note
from ping_llm.errors import PingLlmError

KNOWN_VERSIONS: Final = ("0.2.5",)

_TRAIN: Final = "maxtext.trainers.pre_train.train"
_CONFIG: Final = "maxtext.configs.pyconfig"
_PIPELINE: Final = "maxtext.input_pipeline.input_pipeline_interface"
_LOADING: Final = "maxtext.input_pipeline.multihost_dataloading"
_STATE: Final = "maxtext.common.grain_utility"
_CHECKPOINTS: Final = "maxtext.common.checkpointing"

_ITERATOR: Final = ("config", "global_mesh", "process_indices")
_PARAMETERS: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    (_TRAIN, "main"): ("argv",),
    (_CONFIG, "initialize"): ("argv", "config_class", "kwargs"),
    (_PIPELINE, "make_grain_train_iterator"): _ITERATOR,
    (_PIPELINE, "make_grain_eval_iterator"): _ITERATOR,
    (_LOADING, "_cleanup_orphaned_multiprocessing_processes"): (),
    (_STATE, "for_save"): ("step", "data_iterator", "expansion_factor_real_data"),
    (_STATE, "for_restore"): ("checkpoint_manager", "step", "data_iterator", "expansion_factor_real_data"),
}
"""Functions that are called or replaced, with their parameters."""

_USES: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    (_TRAIN, "initialize"): ("pyconfig", "initialize"),
    (_PIPELINE, "create_data_iterator"): ("make_grain_train_iterator", "make_grain_eval_iterator", "grain"),
    (_LOADING, "MultiHostDataLoadIterator.close"): ("_cleanup_orphaned_multiprocessing_processes",),
    (_STATE, "for_save"): ("ElasticIterator", "local_iterator"),
    (_STATE, "for_restore"): ("ElasticIterator", "local_iterator"),
    (_CHECKPOINTS, "save_checkpoint"): ("grain", "iter"),
    (_CHECKPOINTS, "load_state_if_possible"): ("grain", "iter"),
}
"""Functions of which we rely on what they look up, at the time when they are called."""

_FIELDS: Final = (
    "dataset_type", "grain_worker_count", "grain_per_worker_buffer_size", "grain_ram_budget_mb",
    "grain_worker_count_eval", "grain_per_worker_buffer_size_eval", "data_shuffle_seed", "max_target_length",
    "eval_steps", "num_epoch", "vocab_size", "attention", "max_segments_per_seq", "generate_padding_batch_train",
    "generate_padding_batch_eval", "expansion_factor_real_data", "global_batch_size_to_load",
    "global_batch_size_to_load_eval", "global_batch_size_to_train_on", "global_batch_size_to_eval_on",
)  # fmt: skip
"""Keys of MaxText's that we read."""


def check_seams() -> str:
    """The installed version; an error of one line that says what differs from the versions we know."""
    try:
        version = importlib.metadata.version("maxtext")
    except importlib.metadata.PackageNotFoundError:
        raise PingLlmError('MaxText is not installed: pip install "ping-llm[maxtext]" (Python 3.12 or newer)') from None
    if difference := _difference():
        raise PingLlmError(
            f"MaxText {version} is not one this engine fits: {difference}. "
            f"Known to work: maxtext=={', '.join(KNOWN_VERSIONS)}"
        )
    return version


def _difference() -> str | None:
    for (module, name), wanted in _PARAMETERS.items():
        found = _find(module, name)
        if found is None:
            return f"{module}.{name} is missing"
        parameters = tuple(inspect.signature(found).parameters)
        if parameters != wanted:
            return f"{module}.{name} takes ({', '.join(parameters)}), not ({', '.join(wanted)})"
    for (module, name), uses in _USES.items():
        found = _find(module, name)
        if found is None:
            return f"{module}.{name} is missing"
        code = inspect.unwrap(found).__code__
        for use in uses:
            if use not in code.co_names and not any(use == c or use in _strings(c) for c in code.co_consts):
                return f"{module}.{name} does not use {use}"
    from grain.experimental import ElasticIterator

    if _find(_STATE, "ElasticIterator") is not ElasticIterator:
        return f"{_STATE}.ElasticIterator is not Grain's"
    fields = importlib.import_module("maxtext.configs.types").MaxTextConfig.model_fields
    if missing := [name for name in _FIELDS if name not in fields]:
        return f"there is no key {missing[0]}"
    return None


def _strings(constant: Any) -> tuple[Any, ...]:
    return constant if isinstance(constant, tuple) else ()


def _find(module: str, name: str) -> Any:
    found: Any
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "maxtext":
            return None
        raise PingLlmError(f'MaxText needs the package {error.name}: pip install "ping-llm[maxtext]"') from None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


@contextmanager
def taken_hold() -> Iterator[None]:
    """Replace the names, and put them back."""
    from ping_llm.engines.maxtext.config import NetworkConfig

    config, pipeline, loading = (importlib.import_module(name) for name in (_CONFIG, _PIPELINE, _LOADING))
    initialize = config.initialize

    def with_our_keys(argv: Any = None, config_class: Any = NetworkConfig, **kwargs: Any) -> Any:
        try:
            settings = initialize(argv, config_class=config_class, **kwargs)
        except (ValueError, TypeError) as error:
            raise PingLlmError(f"the configuration is refused: {_reasons(error)}") from error
        _note_architecture(settings)
        return settings

    def leave_alone() -> None:
        """Instead of ending every orphaned worker process of the machine, other people's included."""

    train = _for_network(iterators.make_train_iterator, pipeline.make_grain_train_iterator)
    evaluation = _for_network(iterators.make_eval_iterator, pipeline.make_grain_eval_iterator)
    with ExitStack() as stack:
        for module, name, ours in (
            (config, "initialize", with_our_keys),
            (pipeline, "make_grain_train_iterator", train),
            (pipeline, "make_grain_eval_iterator", evaluation),
            (loading, "_cleanup_orphaned_multiprocessing_processes", leave_alone),
        ):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, ours)
        yield


def _reasons(error: Exception) -> str:
    """On one line; of Pydantic's errors, only what they say about the keys."""
    if not hasattr(error, "errors"):
        return " ".join(str(error).split())
    reasons = []
    for found in error.errors():
        key = "".join(f"{place}: " for place in found["loc"])
        reasons.append(key + found["msg"].removeprefix("Value error, "))
    return "; ".join(reasons)


def _note_architecture(config: Any) -> None:
    """MaxText's checkpoints do not say what the model is made of: `ping-llm convert` reads it here."""
    import jax

    if config.network_enabled and config.enable_checkpointing and jax.process_index() == 0:
        path = importlib.import_module("etils.epath").Path  # also of a bucket
        folder = path(config.base_output_directory) / config.run_name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / NOTE).write_text(note(config))


def _for_network(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    def make(config: Any, global_mesh: Any, process_indices: Any) -> Any:
        if config.network_enabled:
            return ours(config, global_mesh, process_indices)
        if config.grain_debug_mode:
            import grain

            grain.config.update("py_debug_mode", True)
        return theirs(config, global_mesh, process_indices)

    return make
