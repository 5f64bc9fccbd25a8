"""What a batch must be before MaxText sees it, which itself trains on anything: wrong lengths, positions, numbers."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ping_llm.errors import PingLlmError

ARRAYS: Final = (
    "inputs", "inputs_position", "inputs_segmentation", "targets", "targets_position", "targets_segmentation",
)  # fmt: skip


def check_batch(batch: Mapping[str, Any], *, sequences: int, length: int, vocabulary: int) -> None:
    """An error that names the first broken rule of the batch contract (docs/pipeline.md) and where it is broken."""
    if set(batch) != set(ARRAYS):
        raise _broken(f"its arrays are {', '.join(sorted(batch))}, not {', '.join(sorted(ARRAYS))}")
    for name, array in batch.items():
        if not isinstance(array, np.ndarray) or array.dtype != np.int32 or array.shape != (sequences, length):
            found = f"{getattr(array, 'dtype', type(array).__name__)} {getattr(array, 'shape', '')}"
            raise _broken(f"{name} is {found.strip()}, not int32 ({sequences}, {length})")
    inputs, position, segment = (batch[f"inputs{part}"] for part in ("", "_position", "_segmentation"))
    real = segment > 0
    _require((inputs >= 0) & (inputs < vocabulary), f"inputs holds a token that is not in 0…{vocabulary - 1}")
    _require((segment[:, :1] == 0) | (segment[:, :1] == 1), "the first segment is neither 1 nor padding")
    step = np.diff(segment, axis=1)
    follows = (step == 0) | ((step == 1) & real[:, :-1]) | (segment[:, 1:] == 0)
    _require(follows, "segments are not numbered 1, 2, … with padding only at the end", 1)
    continues = (step == 0) & real[:, :-1]
    expected = np.zeros_like(position)
    expected[:, 1:] = np.where(continues, position[:, :-1] + 1, 0)
    _require(position == expected, "positions do not count from 0 within each segment")
    predicts = np.zeros_like(real)
    predicts[:, :-1] = continues
    shifted = np.zeros_like(inputs)
    shifted[:, :-1] = inputs[:, 1:]
    _require(batch["targets"] == shifted * predicts, "targets are not the inputs shifted by one within each segment")
    for part, wanted in (("position", position), ("segmentation", segment)):
        _require(batch[f"targets_{part}"] == wanted * predicts, f"targets_{part} marks other places than have a target")


def check_segments(batch: Mapping[str, Any], most: int | None) -> None:
    """That no sequence has more segments than the attention was compiled for. None = any number."""
    found = int(batch["inputs_segmentation"].max(initial=0))
    if most is not None and found > most:
        raise PingLlmError(
            f"a sequence has {found} segments, but attention=cudnn_flash_te was told of max_segments_per_seq={most}: "
            "raise it, or choose another attention"
        )


def _require(holds: Any, rule: str, shift: int = 0) -> None:
    if not holds.all():
        sequence, place = np.argwhere(~holds)[0].tolist()
        raise _broken(f"{rule} (sequence {sequence}, place {place + shift})")


def _broken(what: str) -> PingLlmError:
    return PingLlmError(f"a batch was refused before it reached MaxText: {what}")
