"""Collaborative filtering: what nodes that see the network alike measured, to the other end and from it.

ln RTT(i, j) is a mean of what sources like i measured to j, and of what was measured from i to destinations like j. Two
nodes at one site have nearly equal rows in the matrix of RTTs, which a factorisation smooths away: with half of the
pairs of PlanetLab known, the median relative error is .012 instead of .025 with `LogFactors`, with 20 % .025 instead of
.037. (A fifth of every answer is `base` and what it gets wrong for such neighbours.)

How far two nodes are apart is the mean squared difference of their ln RTT to the nodes that both measured, and, as if a
few more had been measured, of all that `base` expects of them: with few known pairs hardly any are in common. One large
error must not part two neighbours, so that in distances no RTT differs from what is expected by more than `clip`. A
pair that was measured keeps its median.

A few dense products of [sources, destinations] matrices: 1 s for 500 nodes, but with the cube of their number.
"""

from dataclasses import dataclass

import numpy as np

from ping_llm.baselines.interface import Baseline, PairTable, Predict, fitted
from ping_llm.core.rtt import Bools, Floats, Ints, Observations, Questions


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """Settings from PlanetLab and MENOG, where a third or three times as much changes little."""

    base: Baseline
    sharpness: float = 3.0
    """The weight of a neighbour is its squared distance to the power of minus this."""
    expected: float = 3.0
    """How many common destinations the distance that the base expects is worth."""
    clip: float = 0.3
    anchor: float = 0.1
    """The base counts like one neighbour at this squared distance."""
    own_share: float = 0.8
    """Of neighbours' RTTs in an answer; the rest is the base, corrected by its mean error for the neighbours."""
    most_nodes: int = 2500
    """With more sources or destinations, the base answers alone: 2,500 take some ten seconds and 600 MB."""
    symmetric: bool = False
    name: str = "neighbours"
    causal: bool = False

    def fit(self, train: Observations) -> Predict:
        table, base = PairTable.of(train), fitted(self.base, train)
        ends = table.source, table.destination
        if self.symmetric:
            ends = np.concatenate(ends), np.concatenate(ends[::-1])
        (sources, row), (destinations, column) = (np.unique(end, return_inverse=True) for end in ends)
        if not len(table) or max(len(sources), len(destinations)) > self.most_nodes:
            return base
        known = np.full((len(sources), len(destinations)), np.nan)
        known[row, column] = np.log(np.resize(table.rtt_ms, len(row)))
        ours, theirs = (end.ravel() for end in np.meshgrid(sources, destinations, indexing="ij"))
        grid = Questions(source=ours, destination=theirs, time_s=np.full(len(ours), np.nan))
        expected = np.log(base(grid)).reshape(known.shape)
        log_ratio = np.where(np.isnan(known), self._complete(known, expected), known) - expected

        def predict(questions: Questions) -> Floats:
            at, is_source = _positions(sources, questions.source)
            to, is_destination = _positions(destinations, questions.destination)
            ratio = np.where(is_source & is_destination, log_ratio[at, to], 0.0)
            if self.symmetric:  # the grid is square
                ratio = np.where(is_source & is_destination, (ratio + log_ratio[to, at]) / 2, 0.0)
            return np.asarray(base(questions) * np.exp(ratio))

        return predict

    def _complete(self, known: Floats, expected: Floats) -> Floats:
        by_source = self._of_neighbours(known, expected)
        by_destination = (part.T for part in self._of_neighbours(known.T, expected.T))
        value, error, total = (ours + theirs for ours, theirs in zip(by_source, by_destination, strict=True))
        anchor = self.anchor**-self.sharpness
        from_values = (value + anchor * expected) / (total + anchor)
        from_errors = expected + error / (total + anchor)
        return np.asarray(self.own_share * from_values + (1 - self.own_share) * from_errors)

    def _of_neighbours(self, known: Floats, expected: Floats) -> tuple[Floats, Floats, Floats]:
        """Sums over rows that are alike, weighted: of what is known, of the base's errors, of the weights."""
        is_known = np.isfinite(known)
        mask, error = is_known.astype(np.float64), np.where(is_known, known - expected, 0.0)
        centre = expected.mean()
        value = np.where(is_known, expected + np.clip(error, -self.clip, self.clip) - centre, 0.0)
        common = mask @ mask.T
        squares = value**2
        apart = np.maximum(squares @ mask.T + mask @ squares.T - 2 * value @ value.T, 0.0)
        filled = np.where(is_known, value, expected - centre)
        length = (filled**2).sum(axis=1)
        of_expected = np.maximum(length[:, None] + length - 2 * filled @ filled.T, 0.0) / filled.shape[1] + 1e-4
        apart = (apart + self.expected * of_expected) / (common + self.expected)
        weight = apart**-self.sharpness
        np.fill_diagonal(weight, 0.0)
        return weight @ np.where(is_known, known, 0.0), weight @ error, weight @ mask


def _positions(nodes: Ints, wanted: Ints) -> tuple[Ints, Bools]:
    """Where each wanted node is among sorted ones, and whether it is."""
    at = np.minimum(np.searchsorted(nodes, wanted), len(nodes) - 1)
    return at, nodes[at] == wanted
