"""Forecasts of the language model: a distribution over RTT codes, from the two bytes that spell them.

After the fields of a question come either FAILED, or RTT_START and the two bytes of the RTT code. So P(failed) is read
off one step, the distribution of the first byte (the coarse answer, four steps per octave) off a second, and that of
the second byte off a third, after each of the 81 first bytes that an RTT can have: a probability of every code. What
many continuations share is read once, into a KV cache:

    histories     [n, length]
    questions     [n, k, length]        k about each history
    answers       [n, k, b, length]     b continuations of each question

A sequence attends to what it continues and to itself, nothing else. Everything is padded to a few shapes, and a layer
is compiled once (`lax.scan`): to compile takes seconds per shape, and what is wasted on padding takes less.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Final, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from ping_llm.config import Config
from ping_llm.core.measurements import MAX_RTT_MS
from ping_llm.core.rtt import CODE_MS, CODES, Floats, Ints, RttDistribution, decode_rtt, encode_rtt, search_rows
from ping_llm.models.lm import ModelSettings, Transformer
from ping_llm.models.lm.transformer import rope_angles
from ping_llm.models.modules import choose_attention, keep_compiled
from ping_llm.predict.prompts import Prompt, Tokens
from ping_llm.runs.trained import Trained
from ping_llm.runs.weights import model_settings, state_of
from ping_llm.tokens import FIRST_BYTE, Role

_BYTES: Final = np.arange(256)
_LONGEST: Final = int(encode_rtt(MAX_RTT_MS))
_FIRST_BYTES: Final = np.unique(CODES[CODES <= _LONGEST] >> 8)
"""Those of RTTs: normalised, and of ten minutes at most."""
_IS_RTT: Final = (_FIRST_BYTES[:, None] << 8 | _BYTES) <= _LONGEST
"""Which second bytes can come after each of them."""
_NEGLIGIBLE: Final = 1e-6
"""After first bytes less likely than this, second bytes are not kept."""

SHARED_QUESTIONS: Final = 16
"""About one history, at once."""
_HISTORIES: Final = 32
"""Read at once, by a GPU. A processor takes longer for them together than for one after the other."""
_QUESTION_LENGTH: Final = 48
"""The longest question has 45 tokens: IPv6, with an absolute time."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StackedModel:
    """A transformer whose layers' weights are stacked, so that one compiled layer runs as all of them."""

    ends_graph: Any = field(metadata={"static": True})
    layer_graph: Any = field(metadata={"static": True})
    ends: Any
    """Weights of what stands before and after the layers."""
    layers: Any

    @classmethod
    def of(cls, settings: ModelSettings, weights: Any) -> Self:
        graph = nnx.split(nnx.eval_shape(lambda: Transformer(settings, nnx.Rngs(0))))[0]
        model = nnx.merge(graph, weights)
        layers = [nnx.split(block) for block in model.blocks]
        model.blocks = nnx.List([])
        ends_graph, ends = nnx.split(model)
        stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *(weights for _, weights in layers))
        return cls(ends_graph, layers[0][0], ends, stacked)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values, [layers, ..., length, heads, size], of sequences that were read."""

    keys: jax.Array
    values: jax.Array
    sizes: jax.Array
    """[...]: tokens of each sequence, without its padding."""


@jax.jit
def extend(
    stacked: StackedModel, before: list[KVCache], tokens: jax.Array, sizes: jax.Array, positions: jax.Array
) -> tuple[jax.Array, KVCache]:
    """Read sequences, padded at the end. `before` is what they continue: of histories nothing, of questions the
    histories, of answers both.

    Gives log-probabilities of what comes after some `positions` [..., m] of each sequence, [..., m, vocabulary].
    """
    model: Transformer = nnx.merge(stacked.ends_graph, stacked.ends)
    settings = model.settings
    shape, length = tokens.shape[:-1], tokens.shape[-1]
    is_flash = not before and choose_attention(settings.attention, settings.dtype) == "cudnn"

    def layer(x: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
        weights, known = inputs
        own: list[tuple[jax.Array, jax.Array]] = []

        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            full = (*shape, length, *query.shape[2:])
            own.append((key.reshape(full), value.reshape(full)))
            if is_flash:
                return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
            parts = [(*of_layer, cache.sizes) for of_layer, cache in zip(known, before, strict=True)]
            return _attend(query.reshape(full), *own[0], parts).reshape(query.shape)

        return nnx.merge(stacked.layer_graph, weights)(x, rope, attend), own[0]

    begin = sum(cache.sizes.reshape(cache.sizes.shape + (1,) * (len(shape) - cache.sizes.ndim)) for cache in before)
    position = (jnp.broadcast_to(begin, shape)[..., None] + jnp.arange(length)).reshape(-1, length)
    rope = rope_angles(position, settings.head_dim, settings.rope_period)
    x = model.embed(tokens.reshape(-1, length))
    x, (keys, values) = jax.lax.scan(layer, x, (stacked.layers, [(cache.keys, cache.values) for cache in before]))
    x = jnp.take_along_axis(x, positions.reshape(len(x), -1, 1), axis=1)
    logs = jax.nn.log_softmax(model.logits(x))
    return logs.reshape(*positions.shape, -1), KVCache(keys, values, sizes)


def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, known: list[tuple[jax.Array, jax.Array, jax.Array]]
) -> jax.Array:
    """One softmax over all that is known and the sequence itself. What is shared is not repeated."""
    *shape, length, _, size = query.shape
    letters = "nkb"[: len(shape)]

    def scores(keys: jax.Array) -> jax.Array:
        products = f"{letters}qhd,{letters[: keys.ndim - 3]}shd->{letters}hqs"
        return jnp.einsum(products, query, keys, preferred_element_type=jnp.float32) * size**-0.5

    parts = []
    for keys, _, sizes in known:
        is_token = jnp.arange(keys.shape[-3]) < sizes[..., None]
        mask = is_token.reshape(*sizes.shape, *(1,) * (len(shape) - sizes.ndim), 1, 1, keys.shape[-3])
        parts.append(jnp.where(mask, scores(keys), -jnp.inf))
    parts.append(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores(key), -jnp.inf))
    share = jax.nn.softmax(jnp.concatenate(parts, axis=-1), axis=-1).astype(value.dtype)
    attended = jnp.zeros(query.shape, query.dtype)
    every = [*(values for _, values, _ in known), value]
    shares = jnp.split(share, np.cumsum([values.shape[-3] for values in every])[:-1], axis=-1)
    for part, values in zip(shares, every, strict=True):
        attended += jnp.einsum(f"{letters}hqs,{letters[: values.ndim - 3]}shd->{letters}qhd", part, values)
    return attended


@jax.jit
def answer(
    stacked: StackedModel, known: KVCache, questions: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of questions [n, k, length] that end with RTT_START: P(failed) [n, k], and probabilities of the first byte
    [n, k, 81] and of the second after each [n, k, 81, 256]."""
    # After the last field comes the result's role; after RTT_START, the last token of these, its first byte.
    positions = jnp.stack([jnp.maximum(sizes - 2, 0), sizes - 1], axis=-1)
    logs, read = extend(stacked, [known], questions, sizes, positions)
    branches = jnp.broadcast_to(FIRST_BYTE + _FIRST_BYTES[:, None], (*sizes.shape, len(_FIRST_BYTES), 1))
    later, _ = extend(stacked, [known, read], branches, jnp.ones_like(branches[..., 0]), jnp.zeros_like(branches))
    result = jax.nn.softmax(logs[..., 0, np.array([Role.FAILED, Role.RTT_START])])
    first = jax.nn.softmax(logs[..., 1, FIRST_BYTE + _FIRST_BYTES])
    second = jax.nn.softmax(later[..., 0, FIRST_BYTE + _BYTES], where=_IS_RTT)
    return result[..., 0], first, second


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CodeDistribution(RttDistribution):
    """The probability of an RTT code is that of its first byte times that of its second byte, given the first.

    Second bytes are kept for the first bytes that matter; for the others, which have next to no probability, all second
    bytes count as equally likely. Code 0, which no RTT has, counts as code 1.
    """

    first: Floats
    """[n, 256]: of the first byte, given an answer."""
    kept: Ints
    """[n, 256]: row of `second` that belongs to a first byte."""
    second: npt.NDArray[np.float32]
    """[1 + kept, 256]; the first row stands for all that are not kept."""

    _SHARED: ClassVar[frozenset[str]] = frozenset({"second"})

    @property
    def mean(self) -> Floats:
        """Exact: of a code, the value is mantissa·2^exponent µs, and the second byte is the end of the mantissa."""
        mantissa = ((_BYTES & 7) << 8) + (self._second @ _BYTES)[self.kept]
        return (self._first * np.ldexp(mantissa, _BYTES >> 3)).sum(axis=1) / 1000.0

    def _cdf(self, rtt_ms: Floats) -> Floats:
        at = np.searchsorted(CODE_MS, rtt_ms, side="right") - 1
        rows, code = np.arange(len(self))[:, None], CODES[np.maximum(at, 0)]
        first = code >> 8
        within = self._second_until[self.kept[rows, first], code & 0xFF]
        until = self._first_until[rows, first] - self._first[rows, first] * (1.0 - within)
        return np.where(at < 0, 0.0, np.maximum(until, 0.0))  # below 0: rounding

    def _quantile(self, level: Floats) -> Floats:
        rows = np.broadcast_to(np.arange(len(self))[:, None], level.shape)
        byte = search_rows(self._first_until, rows, level)
        first = self._first[rows, byte]
        inside = (level - self._first_until[rows, byte] + first) / np.maximum(first, 1e-300)
        last = search_rows(self._second_until, self.kept[rows, byte], np.clip(inside, 0.0, 1.0))
        return decode_rtt(np.maximum(byte << 8 | last, CODES[0]))

    def _code_probability(self, codes: Ints) -> Floats:
        rows = np.arange(len(self))[:, None]
        first, last = codes >> 8, codes & 0xFF
        second = self._second[self.kept[rows, first], last]
        second = np.where(codes == CODES[0], second + self._second[self.kept[rows, 0], 0], second)
        return self._first[rows, first] * second

    @cached_property
    def _first(self) -> Floats:
        return self.first / self.first.sum(axis=1, keepdims=True)

    @cached_property
    def _second(self) -> Floats:
        second = self.second.astype(np.float64)
        return second / second.sum(axis=1, keepdims=True)

    @cached_property
    def _first_until(self) -> Floats:
        return _cumulated(self._first)

    @cached_property
    def _second_until(self) -> Floats:
        return _cumulated(self._second)


def _cumulated(probability: Floats) -> Floats:
    until = np.cumsum(probability, axis=1)
    return until / until[:, -1:]  # rounding must not leave the last one below 1


Table = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A trained model that answers; `Predictor.from_pretrained("runs/ping-llm/my-run").language_model` is one."""

    config: Config
    settings: ModelSettings
    weights: Any

    @classmethod
    def of(cls, trained: Trained) -> Self:
        """As it was trained, or in float32 on a processor, which is slow at anything else."""
        keep_compiled()
        settings = replace(model_settings(trained.config), attention="auto", quantization="none", remat="none")
        if jax.default_backend() == "cpu":
            settings = replace(settings, dtype="float32")
        return cls(config=trained.config, settings=settings, weights=state_of(trained))

    @cached_property
    def stacked(self) -> StackedModel:
        return StackedModel.of(self.settings, self.weights)

    def read_histories(self, histories: Sequence[Tokens], count: int = 1) -> KVCache:
        """Histories, which may be empty, and as many empty ones as make `count`."""
        sizes = np.array([len(history) for history in histories] + [0] * (count - len(histories)), dtype=np.int32)
        tokens = token_table(histories, (count,), self.padded_history(int(sizes.max())))
        return extend(self.stacked, [], tokens, sizes, np.zeros((count, 1), dtype=np.int32))[1]

    def padded_history(self, size: int) -> int:
        """The length that a history of so many tokens is padded to."""
        return next(length for length in self.history_lengths if length >= size)

    @property
    def history_lengths(self) -> tuple[int, ...]:
        """A quarter of a context, half of one, and all of it."""
        return tuple(-(-self.config.max_target_length // parts) for parts in (4, 2, 1))

    def forecast(self, prompts: Sequence[Prompt]) -> CodeDistribution:
        """The distribution of the result of each prompt's question. Prompts with the same history share the work."""
        p_failed, first = np.zeros(len(prompts)), np.zeros((len(prompts), 256))
        kept, second = np.zeros((len(prompts), 256), dtype=np.int64), [np.full((1, 256), 1 / 256, dtype=np.float32)]
        rows = 1
        for groups, count in self._batches(prompts):
            known = self.read_histories([prompts[group[0]].history for group in groups], count)
            per_call = 1 if count > 1 or len(groups[0]) == 1 else SHARED_QUESTIONS
            for begin in range(0, len(groups[0]), per_call):
                numbers = [group[begin : begin + per_call] for group in groups]
                where = np.array([(n, k) for n, some in enumerate(numbers) for k in range(len(some))]).T
                asked = np.concatenate(numbers)
                questions = [np.append(prompts[n].question, np.uint16(Role.RTT_START)) for n in asked.tolist()]
                sizes = np.ones((count, per_call), dtype=np.int32)
                sizes[*where] = [len(question) for question in questions]
                tokens = token_table(questions, sizes.shape, _QUESTION_LENGTH, where)
                found = answer(self.stacked, known, tokens, sizes)
                p_failed[asked], of_first, of_second = (np.asarray(part)[*where] for part in found)
                first[asked[:, None], _FIRST_BYTES] = of_first
                is_kept = of_first > _NEGLIGIBLE
                is_kept[:, -1] = True  # not all second bytes are possible there
                question, byte = np.nonzero(is_kept)
                kept[asked[question], _FIRST_BYTES[byte]] = rows + np.arange(len(question))
                second.append(of_second[is_kept])
                rows += len(question)
        return CodeDistribution(p_failed=p_failed, first=first, kept=kept, second=np.concatenate(second))

    def _batches(self, prompts: Sequence[Prompt]) -> Iterator[tuple[list[Ints], int]]:
        """Groups of questions whose histories are read together, and as how many.

        Either one history with all that is asked about it, or many of similar length with a question each: a history
        is read again for each of a few questions if that is less than to answer what is padding.
        """
        by_history: dict[bytes, list[int]] = {}
        for number, prompt in enumerate(prompts):
            by_history.setdefault(prompt.history.tobytes(), []).append(number)
        single: dict[int, list[Ints]] = {}
        per_answer = _QUESTION_LENGTH + len(_FIRST_BYTES)
        for group in map(np.array, by_history.values()):
            length = self.padded_history(len(prompts[group[0]].history))
            if len(group) * (length + per_answer) > length + SHARED_QUESTIONS * per_answer:
                yield [group], 1
            else:
                single.setdefault(length, []).extend(group[:, None])
        at_once = histories_at_once()[-1]
        for members in single.values():
            for begin in range(0, len(members), at_once):
                some = members[begin : begin + at_once]
                yield some, at_once if len(some) > 1 else 1


def histories_at_once() -> tuple[int, ...]:
    return (1,) if jax.default_backend() == "cpu" else (1, _HISTORIES)


def power_of_two(count: int) -> int:
    """The next one, so that few different shapes are compiled."""
    return 1 << max(0, count - 1).bit_length()


def token_table(sequences: Sequence[Tokens], shape: tuple[int, ...], length: int, where: Ints | None = None) -> Table:
    """Sequences, padded, at these indices (None: the first ones) of an array of this shape."""
    table = np.zeros((*shape, length), dtype=np.int32)
    indices = np.arange(len(sequences))[None] if where is None else where
    for index, sequence in zip(indices.T.tolist(), sequences, strict=True):
        table[*index, : len(sequence)] = sequence
    return table
