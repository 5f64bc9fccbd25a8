"""Where the engine takes hold of MaxText, checked before anything is touched.

MaxText has no plug-in mechanism. Four of its names are replaced for the time of a run: the one that reads the
configuration, so that it knows our keys; the two that make Grain iterators, so that `network` gets ours; and the one
that looks for orphaned worker processes, because it ends those of everybody on the machine.
"""

import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from ping_llm.core.console import err
from ping_llm.core.errors import PingLlmError
from ping_llm.integrations.maxtext import iterators
from ping_llm.integrations.maxtext.architecture import NOTE, note

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
    from ping_llm.integrations.maxtext.config import NetworkConfig

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


# From the command line into MaxText's own trainer.

USAGE: Final = """usage: python -m ping_llm.integrations.maxtext CONFIG key=value…

Trains with stock MaxText. CONFIG is a MaxText configuration, such as configs/maxtext/latency_network.yml or MaxText's
own base.yml; every key of MaxText can be given, and those of dataset_type=network (docs/maxtext.md).
"""


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2 or argv[1] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0 if len(argv) > 1 else 2
    try:
        run(argv)
    except PingLlmError as error:
        err.print(f"error: {' '.join(str(error).split())}", markup=False, soft_wrap=True)
        return 1
    return 0


def run(argv: Sequence[str]) -> None:
    """A whole training run, with the arguments of `python -m maxtext.trainers.pre_train.train`."""
    if sys.version_info < (3, 12):
        raise PingLlmError("MaxText needs Python 3.12 or newer")
    if not _is_installed("google.cloud.storage"):
        os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
    from ping_llm.integrations.maxtext import iterators

    version = check_seams()
    if version not in KNOWN_VERSIONS:
        err.print(f"note: MaxText {version} looks as expected, but was not tried; known: {', '.join(KNOWN_VERSIONS)}")
    arguments = [argv[0], str(_config_file(argv[1])), *argv[2:]]
    _check_names(arguments)
    _join_processes()
    train = importlib.import_module("maxtext.trainers.pre_train.train")
    _log_as_maxtext_does()
    with taken_hold():
        try:
            train.main(arguments)
        except Exception as error:
            if ours := _cause(error):
                raise ours from error
            raise
        finally:
            iterators.close_all()


def _cause(error: BaseException | None) -> PingLlmError | None:
    """The error of ours that others on the way up (Orbax, MaxText) wrapped in theirs."""
    while error is not None and not isinstance(error, PingLlmError):
        error = error.__cause__ or error.__context__
    return error


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _config_file(name: str) -> Path:
    """A file of the user's, or one of those that come with MaxText, such as `base.yml`."""
    folder = Path(importlib.import_module("maxtext.utils.globals").MAXTEXT_CONFIGS_DIR)
    relative = name.removeprefix("src/maxtext/configs/")
    for candidate in (Path(name), folder / relative):
        if candidate.is_file():
            return candidate
    raise PingLlmError(f"cannot find the configuration {name}: give a file, or one of MaxText's such as base.yml")


def _check_names(arguments: Sequence[str]) -> None:
    """A misspelt key gets a suggestion; MaxText would answer with the list of all its keys."""
    from ping_llm.integrations.maxtext.config import NetworkConfig

    known = _names(NetworkConfig)
    try:
        in_file = yaml.safe_load(Path(arguments[1]).read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise PingLlmError(f"{arguments[1]} is not a configuration: {' '.join(str(error).split())}") from None
    if not isinstance(in_file, dict):
        raise PingLlmError(f"{arguments[1]} is not a configuration: it must hold lines of the form key: value")
    given = [(name, arguments[1]) for name in in_file if name != "base_config"]
    for text in arguments[2:]:
        name, equals, _ = text.partition("=")
        if not equals:
            raise PingLlmError(f"{text}: write key=value")
        given.append((name.partition(".")[0], text))
    for name, where in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.7)
            advice = f"did you mean {' or '.join(near)}?" if near else "docs/maxtext.md and MaxText's base.yml list all"
            raise PingLlmError(f"{where}: unknown key {name}: {advice}")


def _names(model: Any) -> Collection[str]:
    names: set[str] = set()
    for name, field in model.model_fields.items():
        names.add(name)
        if hasattr(field.annotation, "model_fields"):
            names |= set(_names(field.annotation))
    return names


def _join_processes() -> None:
    """With JAX_COORDINATOR_ADDRESS set, as for our own trainer. Otherwise MaxText finds the others in its own ways."""
    if not os.environ.get("JAX_COORDINATOR_ADDRESS"):
        return
    import jax

    from ping_llm.training.processes import find_place

    if place := find_place(os.environ):
        jax.distributed.initialize(**place)


def _log_as_maxtext_does() -> None:
    """What `absl.app.run` would have set up. Grain's worker processes ask for absl's flags."""
    from absl import flags
    from absl import logging as absl_logging

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    absl_logging.use_absl_handler()
    absl_logging.set_verbosity(absl_logging.INFO)
    logging.getLogger("ping_llm").setLevel(logging.INFO)
