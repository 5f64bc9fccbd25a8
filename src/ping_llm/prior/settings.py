"""What simulated topologies are made of: sizes and shares."""

from dataclasses import dataclass

from ping_llm.core.errors import PingLlmError


@dataclass(frozen=True, kw_only=True)
class WorldSettings:
    """The prior, and how much of each world a batch shows."""

    context: int = 512
    """Places of a context. One of them holds nothing, the others measurements."""
    questions: int = 128
    """Questions asked of each world. One more costs a 640th of a step, one more context all of one."""
    fewest_nodes: int = 2
    most_nodes: int = 400
    """Sizes are log-uniform, tilted to the larger. Without very small worlds, training stays on a plateau for thousands
    of steps; without those of one pair, a model trusts no history in which only one pair is measured."""
    most_asked: int = 8
    """Destinations for whose sake a context is chosen: 1 to this many, log-uniform. Prediction may share a context
    among as many questions of one source."""
    pairs_per_place: int = 12
    """Pairs drawn in a world for each place of its context; what the context is then chosen from."""
    most_cities: int = 64
    most_networks: int = 24
    least_known: float = 0.02
    most_known: float = 0.9
    """Share of pairs that were measured, log-uniform between the two."""
    bipartite_share: float = 0.35
    """Worlds of probes and targets, where no probe is measured from another probe."""
    series_share: float = 0.4
    """Worlds of single pings, repeated over time; the others have one value for each pair."""

    def __post_init__(self) -> None:
        if not 2 <= self.fewest_nodes <= self.most_nodes:
            raise PingLlmError(f"worlds of {self.fewest_nodes} to {self.most_nodes} nodes: at least 2, in this order")
        if min(self.context, self.questions, self.most_asked, self.pairs_per_place) < 1:
            raise PingLlmError("context, questions, most_asked and pairs_per_place are at least 1")

    @property
    def pairs(self) -> int:
        return max(self.context * self.pairs_per_place, self.questions)

    @property
    def repeats(self) -> int:
        """Further measurements of pairs that were measured already."""
        return 2 * self.context
