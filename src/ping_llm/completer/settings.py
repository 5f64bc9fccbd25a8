"""What worlds and the completer are made of: sizes and shares."""

from dataclasses import dataclass

from ping_llm.completer.answers import PRECISIONS
from ping_llm.completer.features import TIME_FEATURES, VALUE_FEATURES
from ping_llm.errors import PingLlmError


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


@dataclass(frozen=True, kw_only=True)
class CompleterSettings:
    """A set transformer. The defaults have 18 M parameters and are 36 MB in 16 bits."""

    layers: int = 10
    width: int = 384
    heads: int = 6
    head_dim: int = 64
    mlp_width: int = 1024
    identity: int = 128
    """Length of the random vectors that stand for nodes. Cosines between 400 of them stay below 0.45."""
    bins: int = 512
    """Of ln RTT from 0.05 to 2000 ms: 2 % each, and finer where neighbours share the probability."""
    dtype: str = "bfloat16"
    """Of activations and of the matrices they are multiplied with. Norms, logits and the loss are float32."""
    weight_dtype: str = "float32"
    attention: str = "auto"
    """`plain`, `cudnn` (NVIDIA GPUs, 16 bits), or `auto`: whichever is best here."""

    def __post_init__(self) -> None:
        if 2 * self.identity >= self.width:
            raise PingLlmError(f"two identities of {self.identity} leave nothing of a width of {self.width}")

    @property
    def parameters(self) -> int:
        attention = 4 * self.width * self.heads * self.head_dim
        embedding = 2 * self.identity + VALUE_FEATURES + TIME_FEATURES + 4
        head = self.bins + 1 + 2 * self.head_dim + 1 + PRECISIONS
        return self.layers * (attention + 3 * self.width * self.mlp_width) + (embedding + head) * self.width

    def flops_per_context(self, context: int, questions: int) -> int:
        """Of a training step, for one context: 6 a parameter and position, and attention to the whole context."""
        positions = context + questions
        return 6 * self.parameters * positions + 12 * self.layers * self.heads * self.head_dim * context * positions
