"""Forecasts of the language model: a distribution over RTT codes, from the two bytes that spell them.

After the fields of a question come either FAILED, or RTT_START and the two bytes of the RTT code. So P(failed) is read
off one step, the distribution of the first byte (the coarse answer, four steps per octave) off a second, and that of
the second byte off a third, for each first byte that has any probability. What many continuations share is read once,
into a KV cache:

    histories     [n, length]
    questions     [n, k, length]        k about each history
    answers       [n, k, b, length]     b continuations of each question

A sequence attends to what it continues and to itself, nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Final, Self

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from ping_llm.config import Config
from ping_llm.core.rtt import CODE_MS, CODES, Floats, Ints, RttDistribution, decode_rtt, search_rows
from ping_llm.models.lm import ModelSettings, Transformer
from ping_llm.models.lm.transformer import rope_angles
from ping_llm.predict.prompts import Prompt, Tokens
from ping_llm.runs.trained import Trained
from ping_llm.runs.weights import model_settings, state_of
from ping_llm.tokens import FIRST_BYTE, Role

_BYTES: Final = np.arange(256)
_NORMALISED: Final = (_BYTES < 8) | (_BYTES & 4 > 0)
"""First bytes that an RTT code can have: exponent 0, or the mantissa's highest bit set."""
_NEGLIGIBLE: Final = 1e-6
"""First bytes less likely than this are not looked into."""

_TOKENS_PER_CALL: Final = 16_384
_ANSWERS_PER_CALL: Final = 4_096
_HISTORY_LENGTHS: Final = 128
_QUESTION_LENGTHS: Final = 16
"""Sequences are padded to multiples of these: few different shapes are compiled."""

STEADY_QUESTIONS: Final = 16
_STEADY_SINGLES: Final = 8
_STEADY_ANSWERS: Final = 44
"""A third of the first bytes that an RTT code can have."""
_STEADY_QUESTION_LENGTH: Final = 48
"""The longest question has 45 tokens: IPv6, with an absolute time."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of each layer, [..., length, heads, size], of sequences that were read."""

    layers: list[tuple[jax.Array, jax.Array]]
    sizes: jax.Array
    """[...]: tokens of each sequence, without its padding."""


def extend(
    graph: Any, weights: Any, before: list[KVCache], tokens: jax.Array, sizes: jax.Array, positions: jax.Array
) -> tuple[jax.Array, KVCache]:
    """Read sequences, padded at the end. `before` is what they continue: of histories nothing, of questions the
    histories, of answers both.

    Gives log-probabilities of what comes after some `positions` [..., m] of each sequence, [..., m, vocabulary].
    """
    model: Transformer = nnx.merge(graph, weights)
    shape, length = tokens.shape[:-1], tokens.shape[-1]
    layers: list[tuple[jax.Array, jax.Array]] = []

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        full = (*shape, length, *query.shape[2:])
        own_key, own_value = key.reshape(full), value.reshape(full)
        known = [(*cache.layers[len(layers)], cache.sizes) for cache in before]
        layers.append((own_key, own_value))
        return _attend(query.reshape(full), own_key, own_value, known).reshape(query.shape)

    begin = sum(cache.sizes.reshape(cache.sizes.shape + (1,) * (len(shape) - cache.sizes.ndim)) for cache in before)
    position = (jnp.broadcast_to(begin, shape)[..., None] + jnp.arange(length)).reshape(-1, length)
    rope = rope_angles(position, model.settings.head_dim, model.settings.rope_period)
    x = model.embed(tokens.reshape(-1, length))
    for block in model.blocks:
        x = block(x, rope, attend)
    x = jnp.take_along_axis(x, positions.reshape(len(x), -1, 1), axis=1)
    logs = jax.nn.log_softmax(model.logits(x))
    return logs.reshape(*positions.shape, -1), KVCache(layers, sizes)


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


@dataclass(frozen=True, kw_only=True, eq=False)
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
    steady: bool = False
    """Whether all questions are padded to the same few shapes. Some work is wasted on padding; but a program that has
    met each kind of question once compiles nothing any more, which takes seconds per shape."""

    @classmethod
    def of(cls, trained: Trained) -> Self:
        settings = replace(model_settings(trained.config), attention="plain", quantization="none")
        return cls(config=trained.config, settings=settings, weights=state_of(trained))

    @cached_property
    def extend(self) -> Callable[[list[KVCache], Table, Table, Table], tuple[jax.Array, KVCache]]:
        """The function `extend` with these weights, compiled."""
        graph = nnx.split(nnx.eval_shape(lambda: Transformer(self.settings, nnx.Rngs(0))))[0]
        return partial(jax.jit(partial(extend, graph)), self.weights)

    def read_histories(self, histories: Sequence[Tokens], count: int) -> KVCache:
        """Histories, which may be empty, and as many empty ones as make `count`."""
        sizes = np.array([len(history) for history in histories] + [0] * (count - len(histories)), dtype=np.int32)
        tokens = token_table(histories, (count,), self.padded_history(int(sizes.max())))
        return self.extend([], tokens, sizes, np.zeros((count, 1), dtype=np.int32))[1]

    def padded_history(self, size: int) -> int:
        """The length that a history of so many tokens is padded to."""
        if not self.steady:
            return padded(size, _HISTORY_LENGTHS)
        return min(self.config.max_target_length, max(256, power_of_two(size)))

    def forecast(self, prompts: Sequence[Prompt]) -> CodeDistribution:
        """The distribution of the result of each prompt's question. Prompts with the same history share the work."""
        by_history: dict[bytes, list[int]] = {}
        for number, prompt in enumerate(prompts):
            by_history.setdefault(prompt.history.tobytes(), []).append(number)
        p_failed, first = np.zeros(len(prompts)), np.zeros((len(prompts), 256))
        kept, second = np.zeros((len(prompts), 256), dtype=np.int64), [np.full((1, 256), 1 / 256, dtype=np.float32)]
        for groups in self._batches(prompts, list(by_history.values())):
            known = self.read_histories([prompts[group[0]].history for group in groups if group], len(groups))
            longest = padded(max(len(prompts[n].question) for group in groups for n in group) + 1, _QUESTION_LENGTHS)
            count = STEADY_QUESTIONS if self.steady else max(1, _TOKENS_PER_CALL // (longest * len(groups)))
            for begin in range(0, max(map(len, groups)), count):
                some = [group[begin : begin + count] for group in groups]
                answers, numbers = self._answer(known, prompts, some), [number for group in some for number in group]
                p_failed[numbers], first[numbers] = answers.p_failed, answers.first
                kept[numbers] = np.where(answers.kept, answers.kept - 1 + sum(map(len, second)), 0)
                second.append(answers.second[1:])
        return CodeDistribution(p_failed=p_failed, first=first, kept=kept, second=np.concatenate(second))

    def _batches(self, prompts: Sequence[Prompt], groups: list[list[int]]) -> Iterator[list[list[int]]]:
        """Groups of questions whose histories are read together: of similar length, and not too many at once."""
        if self.steady:  # to read a history again costs less than to answer questions that are padding
            yield from ([group] for group in groups if len(group) > _STEADY_SINGLES)
            groups = [[number] for group in groups if len(group) <= _STEADY_SINGLES for number in group]
        lengths = [self.padded_history(len(prompts[group[0]].history)) for group in groups]
        for length in sorted(set(lengths)):
            members = [group for group, size in zip(groups, lengths, strict=True) if size == length]
            count = steady_histories()[-1] if self.steady else max(1, _TOKENS_PER_CALL // length)
            for begin in range(0, len(members), count):
                some = members[begin : begin + count]
                full = next(n for n in steady_histories() if n >= len(some)) if self.steady else len(some)
                yield some + [[]] * (full - len(some))

    def _answer(self, known: KVCache, prompts: Sequence[Prompt], groups: list[list[int]]) -> CodeDistribution:
        """Some questions about each history. Arrays are [histories, questions]; `where` are the indices in use."""
        most = max(len(group) for group in groups)
        shape = len(groups), STEADY_QUESTIONS if self.steady and most > 1 else power_of_two(most)
        where = np.array([(n, k) for n, group in enumerate(groups) for k in range(len(group))]).T
        questions = [np.append(prompts[n].question, np.uint16(Role.RTT_START)) for group in groups for n in group]
        sizes = np.ones(shape, dtype=np.int32)
        sizes[*where] = [len(question) for question in questions]
        length = padded(int(sizes.max()), _STEADY_QUESTION_LENGTH if self.steady else _QUESTION_LENGTHS)
        tokens = token_table(questions, shape, length, where)
        # After the last field comes the result's role; after RTT_START, the last token of these, its first byte.
        positions = np.stack([np.maximum(sizes - 2, 0), sizes - 1], axis=-1)
        logs, read = self.extend([known], tokens, sizes, positions)
        result, first = np.moveaxis(np.asarray(logs, dtype=np.float64)[*where], 1, 0)
        first = np.where(_NORMALISED, first[:, FIRST_BYTE:], -np.inf)
        first = np.exp(first - np.logaddexp.reduce(first, axis=1, keepdims=True))
        failed, answered = result[:, Role.FAILED], result[:, Role.RTT_START]
        kept, second = self._second_bytes([known, read], first, shape, where)
        p_failed = np.exp(failed - np.logaddexp(failed, answered))
        return CodeDistribution(p_failed=p_failed, first=first, kept=kept, second=second)

    def _second_bytes(
        self, before: list[KVCache], first: Floats, shape: tuple[int, int], where: Ints
    ) -> tuple[Ints, npt.NDArray[np.float32]]:
        """Distributions of the second byte after each first byte that matters, and where each question finds them."""
        question, byte = np.nonzero(first > _NEGLIGIBLE)
        nth = np.arange(len(question)) - np.searchsorted(question, question)
        second = np.full((1 + len(question), 256), 1 / 256, dtype=np.float32)
        fitting = min(int(nth.max()) + 1, max(1, _ANSWERS_PER_CALL // (shape[0] * shape[1])))
        count = _STEADY_ANSWERS if self.steady else power_of_two(fitting)
        for begin in range(0, int(nth.max()) + 1, count):
            now = np.flatnonzero((nth >= begin) & (nth < begin + count))
            here = *where[:, question[now]], nth[now] - begin
            tokens = np.zeros((*shape, count, 1), dtype=np.int32)
            tokens[*here, 0] = FIRST_BYTE + byte[now]
            logs, _ = self.extend(before, tokens, np.ones((*shape, count), dtype=np.int32), np.zeros_like(tokens))
            found = np.asarray(logs, dtype=np.float64)[*here, 0, FIRST_BYTE:]
            second[1 + now] = np.exp(found - np.logaddexp.reduce(found, axis=1, keepdims=True))
        kept = np.zeros(first.shape, dtype=np.int64)
        kept[question, byte] = 1 + np.arange(len(question))
        return kept, second


def steady_histories() -> tuple[int, ...]:
    """How many are read at once. A processor takes longer for sixteen together than for one after the other."""
    return (1,) if jax.default_backend() == "cpu" else (1, 16)


def padded(size: int, multiple: int) -> int:
    return max(multiple, -(-size // multiple) * multiple)


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
