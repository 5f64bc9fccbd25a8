"""MaxText's own trainer with our batches and our keys, from the command line.

MaxText has no plug-in mechanism. During a run, `patched` replaces four of its functions: the one that reads the
configuration, so that it knows our keys; the two that make Grain iterators, so that `dataset_type=network` and `text`
get ours; and the one that ends orphaned worker processes, because it ends those of everybody on the machine. Before,
`check_seams` checks that everything we replace or rely on is as in the versions of MaxText that were tested.

This module imports MaxText, Grain and JAX inside functions only, since worker processes of the loader import it.
"""

import difflib
import functools
import importlib
import importlib.metadata
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

from ping_llm.config import KEYS, check_value
from ping_llm.core.console import err, print_error
from ping_llm.core.errors import PingLlmError, one_line
from ping_llm.tokens import VOCABULARY_SIZE

USAGE: Final = """usage: python -m ping_llm.integrations.maxtext CONFIG key=value…

Trains with stock MaxText. CONFIG is a MaxText configuration, such as configs/maxtext/latency_network.yml or MaxText's
own base.yml; every key of MaxText can be given, and those of dataset_type=network and text (docs/maxtext.md).
"""

KNOWN_VERSIONS: Final = ("0.2.5",)

BACKENDS: Final = {"network": "network", "text": "grain"}
"""The values we add to MaxText's `dataset_type`, and the `dataset_type` of ours that each stands for."""

NETWORK_KEYS: Final = (
    "network_data_format", "network_train_files", "network_eval_files", "network_context_measurements",
    "network_max_contexts", "network_result_last", "network_skip_corrupt_rows", "mixture_schedule",
    "skip_steps", "skip_documents", "allow_data_change", "data_cache_dir", "grain_debug_mode",
    "grain_visualization_dir",
)  # fmt: skip
"""Our keys that are added to MaxText's configuration, with our type, default, help and rule."""


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2 or argv[1] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0 if len(argv) > 1 else 2
    try:
        run(argv)
    except PingLlmError as error:
        print_error(error)
        return 1
    return 0


def run(argv: Sequence[str]) -> None:
    """A whole training run, with the arguments of `python -m maxtext.trainers.pre_train.train`."""
    try:
        importlib.import_module("google.cloud.storage")
    except ModuleNotFoundError:
        os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
    version = check_seams()
    if version not in KNOWN_VERSIONS:
        err.print(f"note: MaxText {version} looks as expected, but was not tried; known: {', '.join(KNOWN_VERSIONS)}")
    from ping_llm.integrations.maxtext.iterators import close_all

    arguments = [argv[0], str(_config_file(argv[1])), *argv[2:]]
    _check_names(arguments)
    _join_processes()
    train = importlib.import_module(TRAIN)
    _log_as_maxtext_does()
    with patched():
        try:
            train.main(arguments)
        except Exception as error:
            cause: BaseException | None = error  # one of ours may be wrapped in those of Orbax and MaxText
            while cause is not None and not isinstance(cause, PingLlmError):
                cause = cause.__cause__ or cause.__context__
            if cause is not None:
                raise cause from error
            if any("input_pipeline" in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
                what = f"MaxText cannot use its data: {type(error).__name__}: {one_line(error, 500)}"
                raise PingLlmError(what) from error
            raise
        finally:
            close_all()


def _config_file(name: str) -> Path:
    """A file of the user's, or one of those that come with MaxText, such as `base.yml`."""
    folder = Path(importlib.import_module("maxtext.utils.globals").MAXTEXT_CONFIGS_DIR)
    for candidate in (Path(name), folder / name.removeprefix("src/maxtext/configs/")):
        if candidate.is_file():
            return candidate
    raise PingLlmError(f"cannot find the configuration {name}: give a file, or one of MaxText's such as base.yml")


def _check_names(arguments: Sequence[str]) -> None:
    """A misspelt key gets a suggestion; MaxText would answer with the list of all its keys."""
    from ping_llm.integrations.maxtext.convert import read_yaml

    known = _names(network_config())
    given = [(name, arguments[1]) for name in read_yaml(Path(arguments[1])) if name != "base_config"]
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


def _names(model: Any) -> set[str]:
    """Names of the fields of a Pydantic model and of the models in it."""
    nested = [field.annotation for field in model.model_fields.values() if hasattr(field.annotation, "model_fields")]
    return set(model.model_fields).union(*map(_names, nested))


def _join_processes() -> None:
    """Join processes as our trainer does if JAX_COORDINATOR_ADDRESS is set; otherwise MaxText does so itself."""
    if os.environ.get("JAX_COORDINATOR_ADDRESS"):
        import jax

        from ping_llm.training.processes import find_coordinates

        if coordinates := find_coordinates(os.environ):
            jax.distributed.initialize(**coordinates)


def _log_as_maxtext_does() -> None:
    """Set up what `absl.app.run` would have set up. Grain's worker processes need absl's flags to be parsed."""
    from absl import flags
    from absl import logging as absl_logging

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    absl_logging.use_absl_handler()
    absl_logging.set_verbosity(absl_logging.INFO)
    logging.getLogger("ping_llm").setLevel(logging.INFO)


# -- the seams

TRAIN: Final = "maxtext.trainers.pre_train.train"
CONFIG: Final = "maxtext.configs.pyconfig"
PIPELINE: Final = "maxtext.input_pipeline.input_pipeline_interface"
LOADING: Final = "maxtext.input_pipeline.multihost_dataloading"
STATE: Final = "maxtext.common.grain_utility"
CHECKPOINTS: Final = "maxtext.common.checkpointing"

_ITERATOR: Final = ("config", "global_mesh", "process_indices")
PARAMETERS: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    (TRAIN, "main"): ("argv",),
    (CONFIG, "initialize"): ("argv", "config_class", "kwargs"),
    (PIPELINE, "make_grain_train_iterator"): _ITERATOR,
    (PIPELINE, "make_grain_eval_iterator"): _ITERATOR,
    (LOADING, "_cleanup_orphaned_multiprocessing_processes"): (),
    (STATE, "for_save"): ("step", "data_iterator", "expansion_factor_real_data"),
    (STATE, "for_restore"): ("checkpoint_manager", "step", "data_iterator", "expansion_factor_real_data"),
}
"""Functions that we call or replace, with their parameters."""

_USES: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    (TRAIN, "initialize"): ("pyconfig", "initialize"),
    (PIPELINE, "create_data_iterator"): ("make_grain_train_iterator", "make_grain_eval_iterator", "grain"),
    (LOADING, "MultiHostDataLoadIterator.close"): ("_cleanup_orphaned_multiprocessing_processes",),
    (STATE, "for_save"): ("ElasticIterator", "local_iterator"),
    (STATE, "for_restore"): ("ElasticIterator", "local_iterator"),
    (CHECKPOINTS, "save_checkpoint"): ("grain", "iter"),
    (CHECKPOINTS, "load_state_if_possible"): ("grain", "iter"),
}
"""Functions that must look up these names at the time of the call, since we replace what the names stand for."""

SHARED_KEYS: Final = (
    "data_shuffle_seed", "max_target_length", "eval_steps", "grain_worker_count", "grain_per_worker_buffer_size",
    "grain_ram_budget_mb",
)  # fmt: skip
"""Keys that MaxText and we have with the same meaning."""

SHARED_TEXT_KEYS: Final = (
    "grain_file_type", "grain_train_files", "grain_eval_files", "grain_train_mixture_config_path", "vocab_size",
    "add_bos", "add_eos", "enable_data_shuffling",
)  # fmt: skip
"""Further ones, for `dataset_type=text`."""

KEYS_READ: Final = (
    *SHARED_KEYS, *SHARED_TEXT_KEYS, "dataset_type", "grain_worker_count_eval", "grain_per_worker_buffer_size_eval",
    "num_epoch", "attention", "max_segments_per_seq", "generate_padding_batch_train", "generate_padding_batch_eval",
    "expansion_factor_real_data", "global_batch_size_to_load", "global_batch_size_to_load_eval",
    "global_batch_size_to_train_on", "global_batch_size_to_eval_on", "tokenizer_type", "tokenizer_path",
    "train_data_columns", "eval_data_columns",
)  # fmt: skip
"""All keys of MaxText's that we read."""


def check_seams(keys: Sequence[str] = KEYS_READ) -> str:
    """The installed version of MaxText; an error of one line if it differs from the tested ones in what we rely on."""
    try:
        version = importlib.metadata.version("maxtext")
    except importlib.metadata.PackageNotFoundError:
        raise PingLlmError('MaxText is not installed: pip install "ping-llm[maxtext]" (Python 3.12 or newer)') from None
    if difference := _difference(keys):
        raise PingLlmError(
            f"MaxText {version} is not one this engine fits: {difference}. "
            f"Known to work: maxtext=={', '.join(KNOWN_VERSIONS)}"
        )
    return version


def _difference(keys: Sequence[str]) -> str | None:
    for module, name in (*PARAMETERS, *_USES):
        if _find(module, name) is None:
            return f"{module}.{name} is missing"
    for (module, name), expected in PARAMETERS.items():
        parameters = tuple(inspect.signature(_find(module, name)).parameters)
        if parameters != expected:
            return f"{module}.{name} takes ({', '.join(parameters)}), not ({', '.join(expected)})"
    for (module, name), uses in _USES.items():
        code = inspect.unwrap(_find(module, name)).__code__
        constants = [part for c in code.co_consts for part in (c if isinstance(c, tuple) else [c])]
        for use in uses:
            if use not in code.co_names and use not in constants:
                return f"{module}.{name} does not use {use}"
    from grain.experimental import ElasticIterator

    if _find(STATE, "ElasticIterator") is not ElasticIterator:
        return f"{STATE}.ElasticIterator is not Grain's"
    fields = importlib.import_module("maxtext.configs.types").MaxTextConfig.model_fields
    return next((f"there is no key {name}" for name in keys if name not in fields), None)


def _find(module: str, name: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "maxtext":
            return None
        raise PingLlmError(f'MaxText needs the package {error.name}: pip install "ping-llm[maxtext]"') from None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


@contextmanager
def patched() -> Iterator[None]:
    """Replace MaxText's functions within the block."""
    from ping_llm.integrations.maxtext import iterators

    config, pipeline, loading = (importlib.import_module(name) for name in (CONFIG, PIPELINE, LOADING))
    initialize = config.initialize

    def with_our_keys(argv: Any = None, config_class: Any = None, **kwargs: Any) -> Any:
        try:
            settings = initialize(argv, config_class=config_class or network_config(), **kwargs)
        except (ValueError, TypeError) as error:
            raise PingLlmError(f"the configuration is refused: {_reasons(error)}") from error
        _note_architecture(settings)
        return settings

    def leave_alone() -> None:
        """Instead of ending every orphaned worker process of the machine, other people's included."""

    with ExitStack() as stack:
        for module, name, ours in (
            (config, "initialize", with_our_keys),
            (pipeline, "make_grain_train_iterator", iterators.make_train_iterator),
            (pipeline, "make_grain_eval_iterator", iterators.make_eval_iterator),
            (loading, "_cleanup_orphaned_multiprocessing_processes", leave_alone),
        ):
            theirs = getattr(module, name)
            stack.callback(setattr, module, name, theirs)
            setattr(module, name, ours if module is not pipeline else for_our_data(ours, theirs))
        yield


def for_our_data(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes our iterator for the values we add to `dataset_type`, and MaxText's for all others."""

    def make(config: Any, global_mesh: Any, process_indices: Any) -> Any:
        if config.ping_llm_backend:
            return ours(config, global_mesh)
        if config.grain_debug_mode:
            import grain

            grain.config.update("py_debug_mode", True)
        return theirs(config, global_mesh, process_indices)

    return make


def _reasons(error: Exception) -> str:
    """The error in one line; of Pydantic's errors, the messages about the keys."""
    if not hasattr(error, "errors"):
        return one_line(error, 1000)
    return "; ".join(
        "".join(f"{key}: " for key in found["loc"]) + found["msg"].removeprefix("Value error, ")
        for found in error.errors()
    )


def _note_architecture(config: Any) -> None:
    """Write the model's architecture beside the checkpoints, which lack it: `ping-llm convert` reads it there."""
    import jax

    from ping_llm.integrations.maxtext.convert import NOTE, note

    if config.ping_llm_backend == "network" and config.enable_checkpointing and jax.process_index() == 0:
        path = importlib.import_module("etils.epath").Path  # also of a bucket
        folder = path(config.base_output_directory) / config.run_name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / NOTE).write_text(note(config))


# -- MaxText's configuration with our keys


@functools.cache
def network_config() -> Any:
    """A subclass of MaxText's configuration, for `pyconfig.initialize`.

    `dataset_type=network` and `text` are known to MaxText as `grain`, because only iterators of that type are saved in
    its checkpoints; `ping_llm_backend` tells them apart.
    """
    from pydantic import AfterValidator, Field, create_model, model_validator

    def field(name: str) -> Any:
        def checked(value: Any) -> Any:
            try:
                return check_value(name, value)
            except PingLlmError as error:
                raise ValueError(str(error)) from None

        key = KEYS[name]
        return Annotated[key.annotation, AfterValidator(checked)], Field(key.default, description=key.description)

    fields: dict[str, Any] = {name: field(name) for name in NETWORK_KEYS}
    fields["ping_llm_backend"] = str, Field("", description="Set here: the backend of ping-llm that gives the batches.")
    theirs = importlib.import_module("maxtext.configs.types").MaxTextConfig
    validators: dict[str, Any] = {"as_grain": model_validator(mode="before")(_as_grain)}
    return create_model("NetworkConfig", __base__=theirs, __validators__=validators, **fields)


def _as_grain(cls: Any, values: dict[str, Any]) -> dict[str, Any]:
    kind = values.get("dataset_type")
    backend = BACKENDS.get(str(kind), "")
    values = {**values, "ping_llm_backend": backend}
    folder = str(values.get("base_output_directory") or "")
    if folder and "://" not in folder:  # MaxText's checkpoints need an absolute path
        values["base_output_directory"] = str(Path(folder).absolute())
    if not backend:
        if values.get("grain_visualization_dir"):
            raise ValueError("grain_visualization_dir is for dataset_type=network and text: Grain writes none")
        return values
    if problem := (_network_problem(values) if kind == "network" else _text_problem(values)) or _problem(values):
        raise ValueError(problem)
    values["dataset_type"] = "grain"
    if kind == "text":
        return values
    # MaxText refuses dataset_type=grain without files of its own.
    return values | {
        "grain_file_type": "arrayrecord",
        "grain_train_files": values["network_train_files"],
        "grain_eval_files": values.get("network_eval_files", ""),
    }


def _network_problem(values: dict[str, Any]) -> str | None:
    if not values.get("network_train_files"):
        return "dataset_type=network needs network_train_files: a folder that `ping-llm prepare` wrote"
    if values.get("eval_interval", -1) > 0 and not values.get("network_eval_files"):
        return "eval_interval is set, but network_eval_files is empty: name the evaluation data, or set it to -1"
    if not values.get("enable_data_shuffling", True):
        return "enable_data_shuffling=false: the order of dataset_type=network is always a seeded permutation"
    if values.get("vocab_size", VOCABULARY_SIZE) < VOCABULARY_SIZE:
        return f"vocab_size must be at least {VOCABULARY_SIZE}, the tokens of dataset_type=network"
    return None


def _text_problem(values: dict[str, Any]) -> str | None:
    kind = values.get("grain_file_type", "arrayrecord")
    if kind not in ("arrayrecord", "tokens"):
        return f"grain_file_type={kind}: dataset_type=text reads arrayrecord and tokens; MaxText's own grain the others"
    if values.get("eval_interval", -1) > 0 and not values.get("grain_eval_files"):
        return "eval_interval is set, but grain_eval_files is empty: name the evaluation data, or set it to -1"
    if kind != "tokens" and not (values.get("tokenize_train_data", True) and values.get("tokenize_eval_data", True)):
        return "tokenize_train_data=false: with dataset_type=text, tokenised documents are grain_file_type=tokens"
    return None


def _problem(values: dict[str, Any]) -> str | None:
    """Why these settings do not go with our batches, if they do not."""
    kind = values["dataset_type"]
    if values.get("attention") == "cudnn_flash_jax":  # MaxText's issue 4476
        return (
            "attention=cudnn_flash_jax ignores where segments end, so packed contexts would see each other; "
            "use autoselected, flash, cudnn_flash_te or dot_product"
        )
    if not values.get("packing", True):
        return f"packing=false: batches of dataset_type={kind} are always packed"
    if 0 < values.get("expansion_factor_real_data", -1) < 1:
        return f"expansion_factor_real_data below 1 is not needed: dataset_type={kind} resumes on any number of hosts"
    if values.get("colocated_python_data_input"):
        return f"colocated_python_data_input is not supported by dataset_type={kind}"
    return None
