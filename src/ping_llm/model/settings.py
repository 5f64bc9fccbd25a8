"""The shape of the model, and what follows from it: parameters and floating-point operations."""

from dataclasses import dataclass
from typing import Final

from ping_llm.tokens.vocabulary import VOCABULARY_SIZE

_VOCABULARY_MULTIPLE: Final = 64
"""Matrix units are fastest on round sizes. The rows that fill up the embedding stand for no token and are cut off."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A decoder with rotary positions, root-mean-square norms without scales, and gated MLPs.

    The defaults are `latency_network`: 112 M parameters.
    """

    layers: int = 20
    width: int = 640
    heads: int = 10
    head_dim: int = 64
    mlp_width: int = 2048
    vocabulary: int = VOCABULARY_SIZE
    rope_period: float = 10_000.0
    logits_soft_cap: float = 0.0
    """Logits are squeezed into ± this by tanh; 0 = not."""
    dtype: str = "bfloat16"
    """Of activations and of the matrices they are multiplied with. Norms, angles, logits and the loss are float32."""
    weight_dtype: str = "float32"
    """Of the parameters that the optimizer changes."""
    quantization: str = "none"
    """`fp8`: the products of the layers, and their slopes, in 8 bits (`model.float8`)."""
    attention: str = "auto"
    remat: str = "none"
    """`none` keeps all activations for the backward pass; `full` keeps a layer's input and computes the rest again."""

    @property
    def padded_vocabulary(self) -> int:
        return -(-self.vocabulary // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE

    @property
    def parameters(self) -> int:
        """Counted without the rows that only fill up the embedding."""
        attention = 4 * self.width * self.heads * self.head_dim
        return self.layers * (attention + 3 * self.width * self.mlp_width) + 2 * self.vocabulary * self.width

    def flops_per_token(self, length: int) -> int:
        """Of a training step, by the usual convention: 6 a parameter, and causal attention over the whole sequence.

        Attention within segments does less than that, and padding does none, so this neither counts what was computed
        again nor what was not needed: it is a yardstick that is the same for every implementation.
        """
        return 6 * self.parameters + 6 * self.layers * self.heads * self.head_dim * length
