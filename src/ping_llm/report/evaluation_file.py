"""An evaluation beside the run that was evaluated: what `ping-llm evaluate --json` prints, and curves for charts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from ping_llm.evaluate.scores import Evaluation, ProtocolResult, errors
from ping_llm.report.run import EVALUATION
from ping_llm.runs import RunFolder

_SHARES: Final = np.linspace(0.02, 0.98, 49).round(2)
"""Of the answers, for the distribution of errors; and of probability, for calibration."""


def save_evaluation(found: Evaluation, models: Mapping[str, Path | str | None]) -> list[Path]:
    """Write `evaluation.json` into the folder of every model that is a run. `models` are where they came from."""
    written = []
    for name, where in models.items():
        run = RunFolder(Path(where or "."))
        if where and run.config.is_file() and run.metrics.is_file():
            run.write(run.path / EVALUATION, json.dumps(to_store(found, name)) + "\n")
            written.append(run.path / EVALUATION)
    return written


def to_store(found: Evaluation, model: str | None = None) -> dict[str, Any]:
    """`model` is the one that the file is stored with; the first one if none is named."""
    plain = found.to_json()
    names: dict[str, str] = {}
    curves: dict[str, dict[str, Any]] = {}
    for protocol, result in found.protocols.items():
        keys = dict(zip(result.answers, plain["protocols"][protocol], strict=True))
        names |= {key: name for name, key in keys.items()}
        curves[protocol] = {key: _curves(result, name) for name, key in keys.items()}
    models = [key for key, name in names.items() if name in found.models]
    own = [key for key, name in names.items() if name == (model or next(iter(found.models), None))]
    own_first = own + [key for key in models if key not in own]
    return {**plain, "names": names, "models": own_first, "shares": _SHARES.tolist(), "curves": curves}


def _curves(result: ProtocolResult, name: str) -> dict[str, list[float]]:
    relative = errors(result.answers[name].median_ms, result.asked)[1]
    place = result.answers[name].place
    needed = np.sort(np.abs(2 * place[~np.isnan(place)] - 1))  # the narrowest interval that holds the RTT
    if not len(relative) or not len(needed):
        return {}
    inside = np.searchsorted(needed, _SHARES, side="right") / len(needed)
    return {"relative_error": _rounded(np.quantile(relative, _SHARES)), "inside": _rounded(inside)}


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.4g}") for value in np.asarray(values).tolist()]
