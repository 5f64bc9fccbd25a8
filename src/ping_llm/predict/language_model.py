"""RTT distributions from the byte language model.

After the fields of a question come either FAILED, or RTT_START and the two bytes of the RTT code. So P(failed) is read
off one step, the distribution of the first byte (the coarse answer, four steps an octave) off a second, and that of the
second byte off a third, for those first bytes in which a wanted quantile lies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from ping_llm.config import Config, load_config
from ping_llm.errors import PingLlmError
from ping_llm.model import ModelSettings, attention
from ping_llm.predict.contexts import Prompt
from ping_llm.tokens.rtt_code import decode_rtt, encode_rtt
from ping_llm.tokens.vocabulary import FIRST_BYTE, Role
from ping_llm.train.checkpoints import read_weights
from ping_llm.train.folder import RunFolder
from ping_llm.train.optimizer import optimizer
from ping_llm.train.state import graph, laid_out, model_settings

Floats = npt.NDArray[np.float64]

_TOKENS_AT_ONCE: Final = 16_384
_LENGTHS: Final = 128
"""Prompts are padded to a multiple of this: few different shapes are compiled."""

_BYTES: Final = np.arange(256)
_NORMALISED: Final = (_BYTES < 8) | (_BYTES & 4 > 0)
"""First bytes that an RTT code can have: exponent 0, or the mantissa's highest bit set."""


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A trained model that answers. Make one by `LanguageModel.from_run("runs/ping-llm/my-run")`."""

    config: Config
    settings: ModelSettings
    weights: Any
    step: int

    @classmethod
    def from_run(cls, run: Path | str) -> Self:
        folder = RunFolder(Path(run))
        if not folder.config.exists():
            raise PingLlmError(f"{run} is not a run: it has no {folder.config.name}")
        config = load_config(folder.config)
        settings = model_settings(config)
        settings = replace(settings, attention=attention.choose("auto", settings.dtype))
        mesh = jax.make_mesh((1, 1), ("data", "fsdp"), devices=jax.local_devices()[:1])
        step, weights = read_weights(folder.checkpoints, laid_out(config, optimizer(config), mesh).weights)
        return cls(config=config, settings=settings, weights=weights, step=step)

    def forecast(self, prompts: Sequence[Prompt]) -> "RttForecast":
        """The distribution of the result of each prompt's question."""
        after = [np.append(prompt.tokens, np.uint16(Role.RTT_START)) for prompt in prompts]
        result = self._log_probabilities([prompt.tokens for prompt in prompts])
        failed, answered = result[:, Role.FAILED], result[:, Role.RTT_START]
        first = self._log_probabilities(after)[:, FIRST_BYTE:]
        first[:, ~_NORMALISED] = -np.inf
        first = np.exp(first - np.logaddexp.reduce(first, axis=1, keepdims=True))
        p_failed = np.exp(failed - np.logaddexp(failed, answered))
        return RttForecast(model=self, prompts=after, p_failed=p_failed, first=first)

    def second_byte(self, prompts: Sequence[npt.NDArray[np.uint16]], first: npt.NDArray[np.int64]) -> Floats:
        """Probabilities of the last byte, each prompt having been continued by a first byte."""
        continued = [np.append(p, np.uint16(FIRST_BYTE + b)) for p, b in zip(prompts, first.tolist(), strict=True)]
        logs = self._log_probabilities(continued)[:, FIRST_BYTE:]
        return np.exp(logs - np.logaddexp.reduce(logs, axis=1, keepdims=True))

    def _log_probabilities(self, sequences: Sequence[npt.NDArray[np.uint16]]) -> Floats:
        """Of the token that follows each sequence."""
        sizes = np.array([len(sequence) for sequence in sequences])
        padded = -(-sizes // _LENGTHS) * _LENGTHS
        result = np.empty((len(sequences), self.settings.vocabulary))
        for length in np.unique(padded).tolist():
            members = np.flatnonzero(padded == length)
            count = max(1, _TOKENS_AT_ONCE // length)
            for begin in range(0, len(members), count):
                part = members[begin : begin + count]
                tokens = np.zeros((count, length), dtype=np.int32)
                for place, member in enumerate(part.tolist()):
                    tokens[place, : sizes[member]] = sequences[member]
                last = np.zeros(count, dtype=np.int32)
                last[: len(part)] = sizes[part] - 1
                result[part] = np.asarray(self._following(self.weights, tokens, last))[: len(part)]
        return result

    @cached_property
    def _following(self) -> Any:
        graph_of_model = graph(self.settings)

        @jax.jit
        def following(weights: Any, tokens: jax.Array, last: jax.Array) -> jax.Array:
            position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            logits = nnx.merge(graph_of_model, weights)(tokens, position, jnp.ones_like(tokens), 1)
            return jax.nn.log_softmax(jnp.take_along_axis(logits, last[:, None, None], axis=1)[:, 0])

        return following


@dataclass(frozen=True, kw_only=True)
class RttForecast:
    """Distributions of the results of several questions."""

    model: LanguageModel
    prompts: Sequence[npt.NDArray[np.uint16]]
    p_failed: Floats
    first: Floats
    """[questions, 256]: probability of the first byte of the RTT code, given an answer."""

    def __len__(self) -> int:
        return len(self.p_failed)

    def quantile(self, level: float) -> Floats:
        """Of the RTT in ms, given an answer."""
        before = np.cumsum(self.first, axis=1)
        byte = np.minimum((before < level).sum(axis=1), 255)
        rows = np.arange(len(self))
        inside = level - (before[rows, byte] - self.first[rows, byte])
        second = np.cumsum(self.model.second_byte(self.prompts, byte) * self.first[rows, byte][:, None], axis=1)
        last = np.minimum((second < inside[:, None]).sum(axis=1), 255)
        return decode_rtt(byte << 8 | last)

    def median(self) -> Floats:
        return self.quantile(0.5)

    def log_likelihood(self, rtt_ms: npt.NDArray[Any]) -> Floats:
        """Natural logarithm of the probability of each observed result: its RTT code, or that it failed (NaN)."""
        failed = np.isnan(rtt_ms)
        code = encode_rtt(np.where(failed, 1.0, rtt_ms)).astype(np.int64)
        rows = np.arange(len(self))
        second = self.model.second_byte(self.prompts, code >> 8)[rows, code & 0xFF]
        with np.errstate(divide="ignore"):
            answered = np.log1p(-self.p_failed) + np.log(self.first[rows, code >> 8]) + np.log(second)
            return np.where(failed, np.log(self.p_failed), answered)
