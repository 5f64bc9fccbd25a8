"""Opponents of the completer that are too slow, or need too much, for `ping-llm evaluate`: for `real_data.py`.

All settings were chosen on PlanetLab and MENOG.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import scipy.optimize  # type: ignore[import-untyped]
import scipy.sparse  # type: ignore[import-untyped]

from ping_llm.baselines.coordinates import Descent, Vivaldi
from ping_llm.baselines.factors import LogFactors
from ping_llm.baselines.interface import Baseline, PairTable, Predict, fitted, rows_of
from ping_llm.baselines.neighbours import Neighbours
from ping_llm.core.rtt import Floats, Ints, Observations, Questions
from real_data_sets import PairTask


@dataclass(frozen=True, kw_only=True)
class SchattenCompletion:
    """What `base` gets wrong, as a matrix of small Schatten-p norm: singular values of the known errors, filled up with
    what was found so far, are shrunk again and again, the small ones more (p = 1: all alike, the nuclear norm)."""

    symmetric: bool = False
    power: float = 1.0
    noise: float = 0.1
    """Of ln RTT: singular values of such noise vanish."""
    clip: float = 0.15
    """Larger errors count as this much."""
    rounds: int = 40
    base: Baseline = field(default_factory=lambda: LogFactors(rank=0))
    name: str = "schatten completion"
    causal: bool = False

    def fit(self, train: Observations) -> Predict:
        table, base = PairTable.of(train), fitted(self.base, train)
        if not len(table):
            return base
        errors = np.full((table.nodes + 1, table.nodes + 1), np.nan)
        errors[table.source, table.destination] = np.log(table.rtt_ms / base(table.questions))
        if self.symmetric:
            errors = np.fmax(errors, errors.T)
        rows, columns = (np.flatnonzero(np.isfinite(errors).any(axis=axis)) for axis in (1, 0))
        filled = np.zeros_like(errors)
        filled[np.ix_(rows, columns)] = self._complete(errors[np.ix_(rows, columns)])

        def predict(questions: Questions) -> Floats:
            return np.asarray(base(questions) * np.exp(np.clip(filled[rows_of(questions, table.nodes)], -5, 5)))

        return predict

    def _complete(self, errors: Floats) -> Floats:
        known = np.isfinite(errors)
        target = np.where(known, errors, 0.0)
        threshold = self.noise * np.sqrt(max(known.sum(axis=0).mean(), known.sum(axis=1).mean()))
        now = before = np.zeros_like(errors)
        for number in range(self.rounds):
            ahead = now + number / (number + 3) * (now - before)  # Nesterov's momentum
            error = np.where(known, np.clip(target - ahead, -self.clip, self.clip), 0.0)
            u, s, v = np.linalg.svd(ahead + error, full_matrices=False)
            s = np.maximum(s - threshold * (np.maximum(s, 1e-9) / threshold) ** (self.power - 1), 0.0)
            before, now = now, (u * s) @ v
        return now


@dataclass(frozen=True, kw_only=True, eq=False)
class DistanceOffsets:
    """RTT = slope x distance + an offset of either end, by least absolute deviations (reweighted least squares), in
    units of the root of the RTT, half way between absolute and relative errors. Never below light in fibre."""

    distance_km: Floats = field(repr=False)
    ridge: float = 0.3
    rounds: int = 30
    name: str = "distance + offsets"
    causal: bool = False

    def fit(self, train: Observations) -> Predict:
        table, nodes = PairTable.of(train), len(self.distance_km)
        row = np.arange(len(table))
        ones = np.ones(len(table))
        entries = np.concatenate([self.distance_km[table.source, table.destination] / 100, ones, ones])
        columns = np.concatenate([np.zeros(len(table), np.int64), 1 + table.source, 1 + table.destination])
        design = scipy.sparse.csr_array((entries, (np.tile(row, 3), columns)), shape=(len(table), 1 + nodes))
        weight, effects = ones, np.zeros(1 + nodes)
        for _ in range(self.rounds if len(table) else 0):
            weighted = design.multiply((weight / table.rtt_ms)[:, None]).T
            normal = (weighted @ design).toarray() + np.diag(np.r_[1e-9, np.full(nodes, self.ridge / 100)])
            typical = np.median(effects[1:])
            effects = np.linalg.solve(
                normal, weighted @ table.rtt_ms + np.r_[0, np.full(nodes, typical * self.ridge / 100)]
            )
            error = np.abs(table.rtt_ms - design @ effects) / np.sqrt(table.rtt_ms)
            weight = 1 / np.maximum(error, 0.02)

        def predict(questions: Questions) -> Floats:
            distance = self.distance_km[questions.source, questions.destination] / 100
            offsets = effects[1 + questions.source] + effects[1 + questions.destination]
            return np.maximum(effects[0] * distance + offsets, np.maximum(distance, 0.1))

        return predict


_LEVELS: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
_FEWEST_PAIRS: Final = 50


@dataclass(frozen=True, kw_only=True)
class NodeTrees:
    """Trees on quantiles of the known RTTs of either end, how many there are, the prediction of a `base`, and the
    distance where it is known. In training a pair does not see itself: quantiles and predictions are those of the other
    folds' pairs. What is learned is the error of the base in ln RTT."""

    base: Baseline
    distance_km: Floats | None = field(default=None, repr=False)
    symmetric: bool = False
    forest: bool = False
    """A random forest instead of boosted trees."""
    folds: int = 3
    seed: int = 0
    name: str = "boosted trees"
    causal: bool = False

    def fit(self, train: Observations) -> Predict:
        table = PairTable.of(train)
        if len(table) < _FEWEST_PAIRS:
            return fitted(self.base, train)
        pairs = Observations(
            source=table.source, destination=table.destination, time_s=np.zeros(len(table)), rtt_ms=table.rtt_ms
        )
        # Folds of one size: programs are compiled for a number of pairs.
        size = len(pairs) // self.folds
        rows = np.random.default_rng(self.seed).permutation(len(pairs))[: size * self.folds]
        parts = []
        for held_out in np.split(rows, self.folds):
            learned = np.delete(np.arange(len(pairs)), held_out)
            parts.append(self._features(pairs.take(learned))(pairs.questions.take(held_out)))
        features = np.concatenate(parts)
        trees = self._learner(len(rows)).fit(features, pairs.log_rtt[rows] - features[:, 0])
        of_all = self._features(pairs)

        def predict(questions: Questions) -> Floats:
            features = of_all(questions)
            return np.asarray(np.exp(features[:, 0] + trees.predict(features)))

        return predict

    def _learner(self, rows: int) -> Any:
        from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor  # takes a second to import

        if self.forest:
            each = min(1.0, 3_000 / rows)
            return RandomForestRegressor(
                80, min_samples_leaf=3, max_features=0.4, max_samples=each, random_state=self.seed
            )
        return HistGradientBoostingRegressor(
            loss="absolute_error", max_iter=200, learning_rate=0.05, max_leaf_nodes=15, random_state=self.seed
        )

    def _features(self, pairs: Observations) -> Callable[[Questions], Floats]:
        base = self.base.fit(pairs)
        if self.symmetric:
            ends = [np.concatenate([pairs.source, pairs.destination])] * 2
            log_rtt = np.tile(pairs.log_rtt, 2)
        else:
            ends, log_rtt = [pairs.source, pairs.destination], pairs.log_rtt
        nodes = int(max(end.max() for end in ends)) + 1
        of_sources, of_destinations = (node_statistics(end, log_rtt, nodes) for end in ends)

        def features(questions: Questions) -> Floats:
            source, destination = rows_of(questions, nodes)
            ours, theirs = of_sources[:, source], of_destinations[:, destination]
            if self.symmetric:
                ours, theirs = np.minimum(ours, theirs), np.maximum(ours, theirs)
            columns = [np.log(base(questions)), *ours, *theirs]
            if self.distance_km is not None:
                columns.append(self.distance_km[questions.source, questions.destination])
            return np.stack(columns, axis=1)

        return features


def node_statistics(node: Ints, value: Floats, nodes: int) -> Floats:
    """[statistics, nodes + 1]: quantiles of each node's values, and how many; of nobody (NaN) in the last column."""
    order = np.lexsort((value, node))
    count = np.bincount(node, minlength=nodes + 1)
    first = np.cumsum(count) - count
    value = np.append(value[order], np.nan)
    at = [np.where(count > 0, first + np.rint(level * (count - 1)).astype(np.int64), -1) for level in _LEVELS]
    return np.stack([*(value[row] for row in at), np.log1p(count)])


def blend_weights(predicted: Floats, measured: Floats, prior: float = 5.0, width: float = 0.01) -> Floats:
    """Non-negative weights of the columns, together 1, of least absolute deviation; towards equal ones where there are
    few rows, as if so many more spoke for these. Deviations below the width hardly count."""
    rows, members = predicted.shape
    equal = np.full(members, 1 / members)
    if not rows:
        return equal

    def loss(weights: Floats) -> tuple[float, Floats]:
        error = predicted @ weights - measured
        size = np.sqrt(error**2 + width**2)
        return float(size.mean()), predicted.T @ (error / size) / rows

    found = scipy.optimize.minimize(
        loss,
        equal,
        jac=True,
        method="SLSQP",
        bounds=[(0, 1)] * members,
        constraints={"type": "eq", "fun": lambda weights: weights.sum() - 1, "jac": np.ones_like},
        options={"maxiter": 300, "ftol": 1e-9},
    )
    return np.asarray((rows * found.x + prior * equal) / (rows + prior))


def slower_opponents(task: PairTask, seed: int) -> list[Baseline]:
    """Besides those of `ping-llm evaluate`."""
    vivaldi = Vivaldi(descent=Descent(rate=0.03, seed=seed))
    shared: dict[str, Any] = {"symmetric": task.symmetric, "seed": seed}
    opponents: list[Baseline] = [SchattenCompletion(symmetric=task.symmetric, base=vivaldi)]
    base: Baseline = vivaldi
    if task.distance_km is not None:
        base = DistanceOffsets(distance_km=task.distance_km)
        both = LogFactors(base=base, name="distance + log factors", **shared)
        opponents += [base, both, Neighbours(base=both, symmetric=task.symmetric, name="distance + neighbours")]
    trees = {"distance_km": task.distance_km, **shared}
    return [*opponents, NodeTrees(base=base, **trees), NodeTrees(base=base, forest=True, name="random forest", **trees)]
