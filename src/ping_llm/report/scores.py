"""The scores of an evaluation: read from its file, compared, and shown as cells of a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ping_llm.report.markup import Markup, element

ORACLE: Final = "oracle"
TABS: Final = {"unseen_pair": "Unseen pairs", "seen_pair": "Seen pairs, later", "unseen_probe": "Unseen probes"}


@dataclass(frozen=True, kw_only=True)
class _Column:
    title: str
    digits: int = 2
    best: float | None = 0.0
    """Values nearest to this are best; None: the lowest."""
    percent: bool = False


COLUMNS: Final = {
    "median_re": _Column(title="median RE", digits=1, percent=True),
    "p90_re": _Column(title="p90 RE", digits=0, percent=True),
    "median_ae": _Column(title="median AE, ms"),
    "mae": _Column(title="MAE, ms"),
    "crps": _Column(title="CRPS, ms"),
    "nll_bits": _Column(title="NLL, bits", best=None),
    "coverage90": _Column(title="in 90 %", digits=1, best=0.9, percent=True),
    "brier": _Column(title="Brier", digits=5),
}


Scores = Mapping[str, float | None]


def protocols_of(found: Mapping[str, Any] | None) -> dict[str, dict[str, Scores]]:
    """What of the file has the form that it should."""
    protocols = found.get("protocols") if found else None
    if not isinstance(protocols, dict):
        return {}
    return {
        str(name): {str(who): _numbers(scores) for who, scores in answers.items() if isinstance(scores, dict)}
        for name, answers in protocols.items()
        if isinstance(answers, dict)
    }


def _numbers(scores: Mapping[str, Any]) -> Scores:
    return {
        str(key): float(value) if isinstance(value, int | float) and math.isfinite(value) else None
        for key, value in scores.items()
    }


def classical_best(scores: Mapping[str, Scores], found: Mapping[str, Any]) -> list[tuple[str, Scores]]:
    """The classical predictor with the lowest median error, by its name; none if there is none."""
    names, models = naming(found)
    known = [who for who in scores if who not in models and who != ORACLE and scores[who].get("median_re") is not None]
    best = min(known, key=lambda who: or_infinite(scores[who].get("median_re")), default=None)
    return [] if best is None else [(called(best, names), scores[best])]


def naming(found: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """How predictors are called, and which of them are models, the run's own first."""
    stored, models = found.get("names"), found.get("models")
    names = {str(key): str(value) for key, value in stored.items()} if isinstance(stored, dict) else {}
    known = [str(key) for key in models] if isinstance(models, list) and models else ["model"]
    return names | {ORACLE: "the truth"}, known


def best_in_column(key: str, rivals: Sequence[float | None]) -> float | None:
    column = COLUMNS[key]
    known = [value for value in rivals if value is not None]
    if not known:
        return None
    return min(known) if column.best is None else min(known, key=lambda value: abs(value - (column.best or 0.0)))


def score_cell(key: str, value: float | None, best: float | None, *, rival: bool = True) -> Markup:
    """A score; the best in its column is bold and has a star, for those who do not see colours."""
    column = COLUMNS[key]
    if value is None:
        return element("td", "–", class_="faint")
    text = f"{100 * value:,.{column.digits}f} %" if column.percent else f"{value:,.{column.digits}f}"
    if not rival or best is None or value != best:
        return element("td", text)
    return element("td", element("span", "★", class_="star", aria_label="best: "), text, class_="best")


def called(who: str, names: Mapping[str, str]) -> str:
    return names.get(who, who.replace("_", " "))


def or_infinite(value: float | None) -> float:
    return math.inf if value is None else value
