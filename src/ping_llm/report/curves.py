"""The numbers of every step, as columns."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ping_llm.report.series import Floats
from ping_llm.train.metrics import read_metrics

_COLUMNS: Final = (
    "loss",
    "grad_norm",
    "learning_rate",
    "real_tokens",
    "real_tokens_per_s",
    "mfu",
    "data_wait_fraction",
)


@dataclass(frozen=True, kw_only=True)
class Curves:
    """A number for every step; NaN where there was none."""

    step: Floats
    columns: Mapping[str, Floats]
    evaluated_at: Floats
    eval_loss: Floats

    @classmethod
    def read(cls, file: Path) -> "Curves":
        trained: list[tuple[float, ...]] = []
        evaluated: list[tuple[float, float]] = []
        for record in read_metrics(file):
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                continue
            if "eval_loss" in record:
                evaluated.append((record["step"], _number(record["eval_loss"])))
            elif "loss" in record:
                trained.append((record["step"] + 1, *(_number(record.get(name)) for name in _COLUMNS)))
        table = np.array(trained, dtype=np.float64).reshape(len(trained), 1 + len(_COLUMNS)).T
        held_out = np.array(evaluated, dtype=np.float64).reshape(len(evaluated), 2).T
        columns = dict(zip(_COLUMNS, table[1:], strict=True))
        return cls(step=table[0], columns=columns, evaluated_at=held_out[0], eval_loss=held_out[1])

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    def last(self, name: str) -> float | None:
        finite = self[name][np.isfinite(self[name])]
        return float(finite[-1]) if len(finite) else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
