"""From the command line into MaxText's own trainer."""

import difflib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from ping_llm.console import err
from ping_llm.errors import PingLlmError

USAGE: Final = """usage: python -m ping_llm.engines.maxtext CONFIG key=value…

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
    from ping_llm.engines.maxtext import iterators
    from ping_llm.engines.maxtext.seams import KNOWN_VERSIONS, check_seams, taken_hold

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
    from ping_llm.engines.maxtext.config import NetworkConfig

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

    from ping_llm.train.processes import find_place

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
