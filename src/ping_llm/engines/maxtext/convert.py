"""A trained language model from our trainer to MaxText, and from MaxText to ours. Neither needs MaxText installed."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from ping_llm.engines.maxtext.architecture import NOTE, maxtext_keys, our_config, read_keys
from ping_llm.engines.maxtext.checkpoints import read_weights, write_weights
from ping_llm.engines.maxtext.weights import from_maxtext, to_maxtext
from ping_llm.errors import PingLlmError
from ping_llm.train.task import model_settings
from ping_llm.train.trained import Trained, by_name, load_trained, save_trained, weights_of

_CHECKPOINT: Final = "checkpoint"
_CONFIG: Final = "config.yml"

_HEADER: Final = """# {name}: the model of {where} after {steps:,} steps, for MaxText.
#
#     python -m ping_llm.engines.maxtext {folder}/config.yml run_name=my-run load_parameters_path={path} \\
#         network_train_files=data/probe_rows network_eval_files=data/probe_rows

"""

_CARD: Final = """---
library_name: ping-llm
license: apache-2.0
---

# {name}

A language model of latency measurements, trained by MaxText and converted from {where}. `config.yml` beside this card
describes the model (what it says about training is not how this one was trained); weights are float32 safetensors.
"""


@dataclass(frozen=True, kw_only=True)
class Converted:
    folder: Path
    parameters: int
    steps: int
    load_parameters_path: Path | None = None
    """For MaxText."""


def convert_to_maxtext(run: Path, output: Path, *, overwrite: bool = False) -> Converted:
    """Write the weights of a run, or of an exported model, as a MaxText checkpoint and a configuration for it."""
    trained = load_trained(run)
    if trained.is_completer:
        raise PingLlmError(f"{run} is a completer: only language models can be converted")
    keys = maxtext_keys(trained.config)
    _check_output(output, _CHECKPOINT, overwrite=overwrite)
    settings = model_settings(trained.config)
    ours = {name: np.asarray(array, dtype=np.float32) for name, array in by_name(trained.weights).items()}
    unfinished = output.with_name(f".{output.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_weights(unfinished / _CHECKPOINT, to_maxtext(ours, settings))
    path = (output / _CHECKPOINT / "items").absolute()
    name = trained.config.run_name or output.name
    header = _HEADER.format(name=name, where=trained.where, steps=trained.steps, folder=output, path=path)
    settings_of_run = {"base_config": "base.yml", "dataset_type": "network", "num_epoch": -1} | keys
    (unfinished / _CONFIG).write_text(header + yaml.safe_dump(settings_of_run, sort_keys=False))
    shutil.rmtree(output, ignore_errors=True)
    unfinished.rename(output)
    return Converted(folder=output, parameters=settings.parameters, steps=trained.steps, load_parameters_path=path)


def convert_from_maxtext(
    checkpoint: Path,
    output: Path,
    *,
    config: Path | None = None,
    changes: Sequence[str] = (),
    overwrite: bool = False,
) -> Converted:
    """Write the weights of a MaxText checkpoint as one of our models.

    What the model is made of stands in `config`, as changed by `changes`; None = in the note that the engine left in
    the run's folder, or in the configuration beside a converted checkpoint.
    """
    _check_output(output, "*.safetensors", overwrite=overwrite)
    root = checkpoint.parent if checkpoint.name == "items" else checkpoint
    keys = read_keys(config or _note_of(root), changes)
    name = root.absolute().parents[1].name if root.name.isdigit() else output.name
    ours = our_config(keys, name)
    settings = model_settings(ours)
    arrays = from_maxtext(read_weights(checkpoint), settings, int(keys["param_scan_axis"]))
    steps = int(root.name) + 1 if root.name.isdigit() else 0
    weights: Any = weights_of(ours, arrays, checkpoint)
    trained = Trained(config=ours, weights=weights, steps=steps, where=str(checkpoint))
    card = _CARD.format(name=name, where=checkpoint)
    save_trained(trained, output, card, overwrite=overwrite, dtype="float32")
    return Converted(folder=output, parameters=settings.parameters, steps=steps)


def _note_of(checkpoint: Path) -> Path:
    for note in (checkpoint.parent.parent / NOTE, checkpoint.parent / _CONFIG):
        if note.is_file():
            return note
    raise PingLlmError(f"there is no {NOTE} in the folder of the run: name its MaxText configuration with --config")


def _check_output(output: Path, marker: str, *, overwrite: bool) -> None:
    """A model may be replaced, nothing else."""
    if not output.exists():
        return
    if not overwrite:
        raise PingLlmError(f"{output} exists already; --overwrite replaces it")
    if any(output.iterdir()) and not any(output.glob(marker)):
        raise PingLlmError(f"{output} holds something else than a converted model: choose another folder")
