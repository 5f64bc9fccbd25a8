"""Answers: from known measurements and questions to distributions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ping_llm.core.console import Advance
from ping_llm.core.observations import Floats, Ints, Observations, Questions
from ping_llm.models.completer.answers import FINE, BinDistribution
from ping_llm.models.completer.context import Columns, Known, filled, groups
from ping_llm.models.completer.model import CompleterSettings, SetTransformer
from ping_llm.prior.shared_prefixes import kin_of, without_kin

# mypy: disallow-untyped-calls=False


_CONTEXT_SIZES: Final = (64, 256, 1024)
"""Shapes to compile for, below the largest context: a few, each some seconds of compiling."""


@dataclass(frozen=True, kw_only=True)
class PredictionSettings:
    context: int = 512
    """Measurements to look at, at most."""
    questions_per_context: int = 1
    """Questions of one source and time that share a context: 8 are answered in the time of one, each from a context
    that was chosen for all of them."""
    votes: int = 1
    """Draws of identities whose answers are averaged."""
    contexts_per_call: int = 16
    """What is computed at once. Memory grows with it, and speed up to what the device can do in parallel."""
    seed: int = 0

    @property
    def places(self) -> int:
        """Of questions in a context: whole eights, which attention on a GPU asks for."""
        return -(-self.questions_per_context // 8) * 8


@dataclass(frozen=True, kw_only=True)
class Completer:
    """A trained set transformer that answers questions from measurements it has never seen.

    >>> completer = Completer(settings=settings, weights=weights)
    >>> completer.predict(known, questions).median
    """

    settings: CompleterSettings
    weights: Any
    """State of a `SetTransformer`."""
    prediction: PredictionSettings = PredictionSettings()

    def predict(
        self,
        known: Observations,
        questions: Questions,
        nodes: Sequence[str] | None = None,
        advance: Advance | None = None,
    ) -> BinDistribution:
        """One distribution for each question, from what was known strictly before its time (NaN: from everything).

        `nodes` are the addresses of the nodes' numbers, of which the model learns who shares a prefix with whom.
        """
        p_failed = np.zeros(len(questions))
        probability = np.zeros((len(questions), FINE), np.float32)
        for rows, answers in self.in_parts(known, questions, nodes, advance):
            p_failed[rows], probability[rows] = answers.p_failed, answers.probability
        return BinDistribution(p_failed=p_failed, probability=probability)

    def in_parts(
        self,
        known: Observations,
        questions: Questions,
        nodes: Sequence[str] | None = None,
        advance: Advance | None = None,
    ) -> Iterator[tuple[Ints, BinDistribution]]:
        """The same as they come, some dozens at a time: rows of the questions, and their answers."""
        p = self.prediction
        index = Known(known, p.context - 1, _kin(known, questions) if nodes is None else kin_of(nodes))
        shared = list(groups(questions, p.questions_per_context))
        for start in range(0, len(shared), p.contexts_per_call):
            part = shared[start : start + p.contexts_per_call]
            batch = _stacked([filled(index, questions, group, p.context, p.places) for group in part], p)
            asked = np.arange(p.places) < np.array([len(group.rows) for group in part])[:, None]
            votes = [self._answers(batch, vote) for vote in range(p.votes)]
            bins, failed = (
                np.mean([answers[: len(part)][asked] for answers in of_all], axis=0)
                for of_all in zip(*votes, strict=True)
            )
            rows = np.concatenate([group.rows for group in part])
            yield rows, BinDistribution(p_failed=failed, probability=bins)
            if advance is not None:
                advance(len(rows))

    def with_prediction(self, **changes: Any) -> "Completer":
        """The same completer, for example with `votes=4` or `context=2048`."""
        return replace(self, prediction=replace(self.prediction, **changes))

    def _answers(self, batch: Columns, vote: int) -> tuple[Floats, Floats]:
        p = self.prediction
        of_vote = jax.random.key_data(jax.random.fold_in(jax.random.key(p.seed), vote))
        keys = jnp.broadcast_to(of_vote, (len(batch["context_length"]), *of_vote.shape))  # whoever else is asked
        bins, failed = _compiled(self.settings)(self.weights, {**batch, "identity_key": keys})
        return np.asarray(bins), np.asarray(failed, np.float64)


@cache
def _compiled(settings: CompleterSettings) -> Any:
    if jax.default_backend() == "cpu" and settings.dtype != "float32":  # which computes 16 bits slower than 32
        settings = replace(settings, dtype="float32", attention="plain")
    graph = nnx.split(nnx.eval_shape(lambda: SetTransformer(settings, nnx.Rngs(0))))[0]

    @jax.jit
    def run(weights: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        answers = nnx.merge(graph, weights)(batch)
        return answers.probabilities(), jax.nn.sigmoid(answers.failure_logit)

    return run


def _kin(known: Observations, questions: Questions) -> Ints:
    """Of nodes without addresses."""
    ends = known.source, known.destination, questions.source, questions.destination
    return without_kin(1 + max((int(column.max()) for column in ends if len(column)), default=0))


def _stacked(rows: list[Columns], p: PredictionSettings) -> Columns:
    """A batch of one of two sizes, its contexts cut to the least of a few sizes that holds them."""
    if len(rows) > 1:  # a single question is not to wait for fifteen that nobody asked
        rows = rows + rows[:1] * (p.contexts_per_call - len(rows))
    longest = max(int(row["context_length"]) for row in rows)
    room = next((size for size in _CONTEXT_SIZES if longest <= size < p.context), p.context)
    return {
        name: np.stack(
            [row[name][:room] if np.ndim(row[name]) and name.startswith("context") else row[name] for row in rows]
        )
        for name in rows[0]
    }
