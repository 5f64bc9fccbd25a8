"""The completer learns from context, and sees nothing it must not see."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ping_llm.core.rtt import Observations, Questions
from ping_llm.models.completer.inference import Completer, PredictionSettings
from ping_llm.models.completer.model import SetTransformer, log_density, loss_sums
from ping_llm.models.completer.network import Bins, CompleterSettings, Mixture
from ping_llm.models.modules import by_name
from ping_llm.prior.worlds import WorldSettings
from real_data_sets import parted
from world_fixtures import world_batch

pytestmark = pytest.mark.slow  # compiling worlds and training a model take a minute

SMALL = WorldSettings(context=48, questions=16, most_nodes=40, most_asked=3)
TINY = CompleterSettings(
    layers=2, width=64, heads=4, head_dim=16, mlp_width=128, identity=16, bins=128, dtype="float32", attention="plain"
)
STEPS, WORLDS_PER_STEP = 300, 16
NODES = [f"node {number}" for number in range(5001)]
"""No addresses, so that nobody shares a prefix."""


@pytest.fixture(scope="module")
def graph_and_weights() -> tuple[Any, Any]:
    return nnx.split(SetTransformer(TINY, nnx.Rngs(0)))


@pytest.fixture(scope="module")
def trained(graph_and_weights: tuple[Any, Any]) -> tuple[Any, list[float]]:
    graph, weights = graph_and_weights
    change = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0, 4e-3, 30, STEPS))
    )

    @jax.jit
    def step(weights: Any, memory: Any, batch: Any) -> tuple[Any, Any, Any]:
        def objective(weights: Any) -> tuple[jax.Array, Any]:
            sums = _sums(graph, weights, batch)
            return sums["objective"] / sums["targets"], sums

        gradient, sums = jax.grad(objective, has_aux=True)(weights)
        update, memory = change.update(gradient, memory, weights)
        return optax.apply_updates(weights, update), memory, sums

    memory, losses = change.init(weights), []
    for number in range(STEPS):
        weights, memory, sums = step(weights, memory, world_batch(SMALL, 0, number, 0, WORLDS_PER_STEP))
        losses.append(float(sums["rtt_entropy"] / sums["answered"]))
    return weights, losses


def batch_of_worlds(step: int = 0) -> dict[str, Any]:
    return {name: np.asarray(value) for name, value in world_batch(SMALL, 99, step, 0, WORLDS_PER_STEP).items()}


def predictor(weights: Any, **changes: Any) -> Completer:
    settings = {"context": 64, "whole": 64, "part": 64, "contexts_per_call": 4} | changes
    return Completer(settings=TINY, weights=by_name(weights), prediction=PredictionSettings(**settings))


def line_of_nodes(count: int = 24, seed: int = 0) -> Observations:
    """Nodes along a line: one pair of nodes, one value, no time."""
    rng = np.random.default_rng(seed)
    place = rng.uniform(0, 150, count)
    source, destination = np.triu_indices(count, 1)
    rtt = 3.0 + np.abs(place[source] - place[destination])
    return Observations(source=source, destination=destination, time_s=np.full(len(source), np.nan), rtt_ms=rtt)


def test_training_beats_the_marginal_distribution(trained: tuple[Any, list[float]]) -> None:
    batches = [batch_of_worlds(step) for step in range(12)]
    counted = [b["question_log_rtt"][b["question_counts"] & ~b["question_failed"]] for b in batches]
    lower, share = (np.asarray(x) for x in Bins(TINY.bins).between(jnp.asarray(np.concatenate(counted))))
    hits = np.bincount(lower, 1 - share, TINY.bins) + np.bincount(lower + 1, share, TINY.bins) + 0.5
    chance = hits / hits.sum()
    marginal = -np.mean((1 - share) * np.log(chance[lower]) + share * np.log(chance[lower + 1]))
    assert np.mean(trained[1][-50:]) < marginal - 0.15
    assert np.mean(trained[1][-50:]) < np.mean(trained[1][:20]) - 0.5


def test_predictions_improve_with_context(trained: tuple[Any, list[float]], graph_and_weights: tuple[Any, Any]) -> None:
    graph, weights = graph_and_weights[0], trained[0]
    entropies = {}
    for keep in (0, SMALL.context):
        total = count = 0.0
        for step in range(8):
            batch = batch_of_worlds(step)
            cut = np.arange(SMALL.context) >= keep
            batch["context_kind"] = np.where(cut, 2, batch["context_kind"])
            batch["context_length"] = np.clip(batch["context_length"], 1, max(1, keep))
            sums = jax.jit(partial(_sums, graph))(weights, batch)
            total, count = total + float(sums["rtt_entropy"]), count + float(sums["answered"])
        entropies[keep] = total / count
    assert entropies[SMALL.context] < entropies[0] - 0.2


def _sums(graph: Any, weights: Any, batch: Any) -> Any:
    """Those of training, and the part of the RTTs."""
    mixture = nnx.merge(graph, weights)(batch)
    answered = batch["question_counts"] & ~batch["question_failed"]
    of_rtt = -jnp.sum(jnp.where(answered, log_density(mixture, batch["question_log_rtt"]), 0.0))
    return loss_sums(mixture, batch) | {"rtt_entropy": of_rtt, "answered": jnp.sum(answered)}


def answering(graph: Any, weights: Any) -> Any:
    """What the model says to a batch: probabilities of the bins, and of failure."""

    @jax.jit
    def answer(batch: Any) -> tuple[jax.Array, jax.Array]:
        answers: Mixture = nnx.merge(graph, weights)(batch)
        return answers.probabilities(), answers.failure_logit

    return answer


def test_sums_of_parts_add_up(graph_and_weights: tuple[Any, Any]) -> None:
    graph, weights = graph_and_weights
    batch = batch_of_worlds()
    sums = jax.jit(partial(_sums, graph))
    whole = sums(weights, batch)
    parts = [sums(weights, {k: v[rows] for k, v in batch.items()}) for rows in (slice(0, 8), slice(8, 16))]
    for name, value in whole.items():
        assert sum(float(part[name]) for part in parts) == pytest.approx(float(value), rel=1e-5)


def test_the_order_of_a_context_and_what_lies_behind_it_make_no_difference(graph_and_weights: tuple[Any, Any]) -> None:
    answer = answering(*graph_and_weights)
    batch = batch_of_worlds()
    expected = answer(batch)
    shuffled, rng = dict(batch), np.random.default_rng(0)
    names = [n for n in batch if n.startswith("context") and n != "context_length"]
    for name in names:
        shuffled[name] = batch[name].copy()
    for row, length in enumerate(batch["context_length"]):
        order = rng.permutation(length)
        for name in names:
            shuffled[name][row, :length] = batch[name][row, order]
            shuffled[name][row, length:] = rng.permutation(batch[name][row])[length:]  # must not be looked at
    for got, want in zip(answer(shuffled), expected, strict=True):
        assert np.allclose(got, want, atol=2e-4)


def test_questions_see_neither_answers_nor_each_other(graph_and_weights: tuple[Any, Any]) -> None:
    answer = answering(*graph_and_weights)
    batch = batch_of_worlds()
    expected = answer(batch)
    changed = batch | {"question_log_rtt": batch["question_log_rtt"] + 1, "question_failed": ~batch["question_failed"]}
    changed |= {n: batch[n].copy() for n in ("question_source", "question_destination")}
    changed["question_source"][:, 8:] = batch["question_source"][:, ::-1][:, 8:]
    for got, want in zip(answer(changed), expected, strict=True):
        assert np.allclose(got[:, :8], want[:, :8], atol=1e-5)


def test_parameters_are_counted_right(graph_and_weights: tuple[Any, Any]) -> None:
    assert sum(leaf.size for leaf in jax.tree.leaves(graph_and_weights[1])) == TINY.parameters
    assert 17e6 < CompleterSettings().parameters < 19e6


def test_what_is_measured_later_changes_no_prediction(trained: tuple[Any, list[float]]) -> None:
    rng = np.random.default_rng(3)
    count = 400
    source = rng.integers(0, 10, count)
    known = Observations(
        source=source,
        destination=10 + rng.integers(0, 10, count),
        time_s=np.arange(count, dtype=float) * 60,
        rtt_ms=rng.lognormal(3, 1, count),
    )
    later = known.time_s >= known.time_s[200]
    changed = Observations(**vars(known) | {"rtt_ms": np.where(later, 1.0, known.rtt_ms)})
    questions = known.take(slice(200, 212)).questions
    questions = Questions(**vars(questions) | {"time_s": np.full(12, known.time_s[200])})
    completer = predictor(trained[0])
    expected = completer.predict(known, questions, NODES)
    assert np.array_equal(completer.predict(changed, questions, NODES).probability, expected.probability)
    assert np.array_equal(completer.predict(known.take(~later), questions, NODES).probability, expected.probability)
    earlier = Observations(**vars(known) | {"rtt_ms": np.where(later, known.rtt_ms, 1.0)})
    assert not np.allclose(completer.predict(earlier, questions, NODES).probability, expected.probability)


@pytest.mark.parametrize("settings", [{"whole": 300}, {"whole": 64}, {"whole": 64, "clusters": 0}])
def test_one_query_has_one_answer(trained: tuple[Any, list[float]], settings: dict[str, Any]) -> None:
    """Whatever else is queried, however nodes are numbered, and in whatever order the history is."""
    pairs, rng = line_of_nodes(), np.random.default_rng(0)
    nodes = [f"10.0.{n % 3}.{n}" for n in range(24)]
    known, test = pairs.take(slice(0, None, 2)), pairs.take(slice(1, 81, 2))
    completer = predictor(trained[0], **settings)
    expected = completer.predict(known, test.questions, nodes)
    number = rng.permutation(30)[:24]
    other_nodes = ["192.0.2.1"] * 30
    for old, new in enumerate(number.tolist()):
        other_nodes[new] = nodes[old]

    def renumbered(rows: Any) -> Any:
        return type(rows)(**vars(rows) | {n: number[getattr(rows, n)] for n in ("source", "destination")})

    shuffled = renumbered(known.take(rng.permutation(len(known))))
    part = rng.permutation(len(test))[:7]
    got = predictor(trained[0], **settings).predict(shuffled, renumbered(test.questions.take(part)), other_nodes)
    np.testing.assert_allclose(got.median, expected.take(part).median, rtol=0.01)
    alone = predictor(trained[0], **settings).predict(known, test.questions.take([7]), nodes)
    np.testing.assert_allclose(alone.probability, expected.take([7]).probability, atol=1e-5)


def test_unknown_nodes_and_empty_histories_get_an_answer(trained: tuple[Any, list[float]]) -> None:
    pairs = line_of_nodes()
    questions = Questions(
        source=np.array([-1, 5000, 0]), destination=np.array([-1, 0, 4000]), time_s=np.full(3, np.nan)
    )
    for known in (pairs, pairs.take(slice(0, 0))):
        answer = predictor(trained[0]).predict(known, questions, NODES)
        assert np.all(np.isfinite(answer.median))
        assert np.allclose(answer.probability.sum(axis=1), 1)
    assert len(predictor(trained[0]).predict(pairs, questions.take(slice(0, 0)), NODES)) == 0


def exchanged(rows: Any) -> Any:
    return type(rows)(**vars(rows) | {"source": rows.destination, "destination": rows.source})


def test_an_ensemble_depends_less_on_chance_and_on_the_direction_of_measurements(
    trained: tuple[Any, list[float]],
) -> None:
    known, test = parted(line_of_nodes(), 0.4, seed=0)
    questions = test.take(slice(0, 60)).questions

    def answers(votes: int | None, seed: int, *, exchange: bool = False) -> Any:
        history, queries = (exchanged(known), exchanged(questions)) if exchange else (known, questions)
        return np.log(
            predictor(trained[0], whole=300, part=300, votes=votes, seed=seed).predict(history, queries, NODES).median
        )

    alone, together = (np.stack([answers(votes, seed) for seed in range(4)]) for votes in (1, 4))
    assert together.std(axis=0).mean() < 0.75 * alone.std(axis=0).mean()
    one_way, other_way = (np.abs(answers(v, 0) - answers(v, 0, exchange=True)).mean() for v in (1, 4))
    assert other_way < 0.75 * one_way
    np.testing.assert_array_equal(answers(None, 0), together[0])  # of a short history, four are the default


@pytest.mark.parametrize(
    ("drawn", "nodes", "is_one"),
    [(50, 24, True), (90, 20, True), (90, 24, False), (170, 20, False)],
)
def test_a_short_or_dense_history_is_one_context(
    trained: tuple[Any, list[float]], drawn: int, nodes: int, is_one: bool
) -> None:
    """Short: less than 64 pairs here. Dense: less than 150, four for each node or more. Repeats do not count."""
    one, other = np.triu_indices(nodes, 1)
    in_a_row = np.flatnonzero(other == one + 1)
    rest = np.random.default_rng(0).permutation(np.flatnonzero(other != one + 1))
    pairs, unmeasured = np.split(np.concatenate([in_a_row, rest]), [drawn])
    rows = np.tile(pairs, 3)
    nothing = np.full(len(rows), np.nan)
    known = Observations(source=one[rows], destination=other[rows], time_s=nothing, rtt_ms=np.full(len(rows), 20.0))
    history = predictor(trained[0], whole=150, part=64, clusters=3).history(known, NODES, known.questions)
    sizes = {len(history.context(int(one[pair]), int(other[pair]), np.nan)) for pair in unmeasured[:20]}
    assert (sizes == {drawn}) == is_one


def test_repeats_change_no_answer_about_other_pairs(trained: tuple[Any, list[float]]) -> None:
    known, test = parted(line_of_nodes(), 0.6, seed=0)
    completer = predictor(trained[0], whole=300, part=300)
    once = completer.predict(known, test.questions, NODES)
    often = completer.predict(known.take(np.tile(np.arange(len(known)), 5)), test.questions, NODES)
    np.testing.assert_allclose(often.probability, once.probability, atol=1e-6)
    measured = completer.predict(known.take(np.tile(np.arange(len(known)), 5)), known.questions, NODES)
    assert (measured.median / known.rtt_ms).std() < (
        completer.predict(known, known.questions, NODES).median / known.rtt_ms
    ).std()


def test_votes_and_clusters_answer_every_question(trained: tuple[Any, list[float]]) -> None:
    pairs = line_of_nodes()
    known, test = parted(pairs, 0.6, seed=0)
    answers = predictor(trained[0], votes=2, whole=64, clusters=3).predict(
        known, test.take(slice(0, 40)).questions, NODES
    )
    assert len(answers) == 40
    assert np.isfinite(answers.median).all()


def test_more_keys_make_attention_sharper_as_far_as_a_head_asks_for_it() -> None:
    settings = replace(TINY, layers=1)
    block = SetTransformer(settings, nnx.Rngs(0)).blocks[0]
    x = jax.random.normal(jax.random.key(0), (1, 5, settings.width))
    few, many = jnp.array([512]), jnp.array([2048])
    np.testing.assert_allclose(block.read(x, few)[0], block.read(x, many)[0])  # as initialised
    block.sharpen.kernel[...] = jax.random.normal(jax.random.key(1), block.sharpen.kernel[...].shape)
    np.testing.assert_allclose(block.read(x, few)[1], block.read(x, many)[1])
    ratio = jnp.linalg.norm(block.read(x, many)[0], axis=-1) / jnp.linalg.norm(block.read(x, few)[0], axis=-1)
    power = jnp.log(ratio) / np.log(4)
    assert power.min() < -0.05 < 0.05 < power.max()
