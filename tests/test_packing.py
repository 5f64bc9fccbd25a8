"""Packing of documents: every token once an epoch, hardly any padding, and any sequence by itself."""

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ping_llm.batches.packing import BLOCK_SEQUENCES, PackingPlan, Pieces, packed
from ping_llm.core.errors import PingLlmError

RANDOM = np.random.default_rng(0)
SHAPES = {
    "like text": np.minimum(RANDOM.lognormal(5.5, 1.2, 20_000) + 1, 50_000),
    "none fits beside another": np.full(3_000, 614),
    "one very long": np.append(np.full(500, 3), 3_000_000),
    "tiny": RANDOM.integers(1, 5, 200_000),
    "many empty": RANDOM.integers(0, 3, 50_000) * 40,
}


def plan_of(lengths: npt.ArrayLike, length: int = 256, seed: int = 1) -> PackingPlan:
    return PackingPlan(np.asarray(lengths).astype(np.uint32), length, seed)


def epoch_of(plan: PackingPlan, epoch: int) -> list[Pieces]:
    first = epoch * plan.sequences_per_epoch
    return [plan.pieces_of(range(first + n, first + n + 1)) for n in range(plan.sequences_per_epoch)]


def assert_every_token_once(plan: PackingPlan, sequences: list[Pieces]) -> None:
    document, begin, size = (np.concatenate([getattr(s, name) for s in sequences]) for name in Pieces._fields[1:])
    order = np.lexsort((begin, document))
    document, begin, size = document[order], begin[order], size[order]
    assert (size > 0).all()
    is_first = np.diff(document, prepend=-1) != 0
    assert (begin[is_first] == 0).all()
    assert (begin[1:][~is_first[1:]] == (begin + size)[:-1][~is_first[1:]]).all()
    assert np.array_equal(np.bincount(document, size, len(plan.lengths)), plan.lengths)
    assert max(int(s.size.sum()) for s in sequences) <= plan.length


class TestEpoch:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_has_every_token_of_every_document_in_exactly_one_sequence(self, shape: str) -> None:
        plan = plan_of(SHAPES[shape])
        for epoch in (0, 3):
            assert_every_token_once(plan, epoch_of(plan, epoch))

    @pytest.mark.parametrize("shape", SHAPES)
    def test_pads_at_most_two_sequences_of_a_block(self, shape: str) -> None:
        plan = plan_of(SHAPES[shape])
        padding = plan.sequences_per_epoch * plan.length - plan.tokens
        assert 0 <= padding < 2 * plan.blocks * plan.length
        assert plan.blocks == 1 or padding / plan.tokens < 0.01

    @pytest.mark.parametrize("shape", SHAPES)
    def test_in_order_has_every_token_once_in_that_order(self, shape: str) -> None:
        plan = PackingPlan(np.asarray(SHAPES[shape]).astype(np.uint32), 256, None)
        epoch = epoch_of(plan, 1)
        assert_every_token_once(plan, epoch)
        assert (np.diff(np.concatenate([s.document for s in epoch])) >= 0).all()

    def test_of_text_gives_the_parts_of_a_document_to_few_of_several_processes(self) -> None:
        plan = plan_of(SHAPES["like text"], length=1024)
        pieces = plan.pieces_of(range(plan.sequences_per_epoch))
        _, tokenised = np.unique(np.stack([pieces.sequence // 64 % 8, pieces.document]), axis=1)
        assert plan.lengths[tokenised].sum() < 1.25 * plan.tokens

    def test_does_not_fill_a_batch_with_one_document(self) -> None:
        plan = plan_of(np.append(SHAPES["like text"], 200 * 1024), length=1024)
        pieces = plan.pieces_of(range(plan.sequences_per_epoch))
        longest = pieces.sequence[pieces.document == len(plan.lengths) - 1]
        assert np.bincount(longest // 64).max() <= 32

    def test_of_text_cuts_hardly_a_document_that_would_have_fitted(self) -> None:
        plan = plan_of(SHAPES["like text"], length=1024)
        pieces = sum(len(s.size) for s in epoch_of(plan, 0))
        needed = int(np.sum(-(-plan.lengths.astype(np.int64) // plan.length)))
        assert needed <= pieces <= needed * 1.005

    def test_is_in_another_order_each_time_and_has_as_many_sequences(self) -> None:
        plan = plan_of(SHAPES["like text"])
        first, second = ([tuple(s.document.tolist()) for s in epoch_of(plan, epoch)] for epoch in (0, 1))
        assert len(first) == len(second)
        assert Counter(first) != Counter(second)

    def test_depends_on_the_seed(self) -> None:
        one, other = (plan_of(SHAPES["like text"], seed=seed).pieces_of(range(1)) for seed in (1, 2))
        assert one.document.tolist() != other.document.tolist()

    @given(st.lists(st.integers(0, 90), min_size=1, max_size=60).filter(any), st.integers(2, 40), st.integers(0, 99))
    @example([3], 2, 0)  # an epoch of two tokens' sequences, of which one stays empty
    def test_of_any_documents_is_complete(self, lengths: list[int], length: int, seed: int) -> None:
        plan = plan_of(lengths, length, seed)
        assert_every_token_once(plan, epoch_of(plan, 1))


class TestSequence:
    def test_is_the_same_whatever_was_asked_for_before(self) -> None:
        asked = plan_of(SHAPES["like text"])
        forwards = epoch_of(asked, 0)
        for number in RANDOM.permutation(len(forwards))[:200].tolist():
            alone = plan_of(SHAPES["like text"]) if number % 50 == 0 else asked
            for one, other in zip(alone.pieces_of(range(number, number + 1)), forwards[number], strict=True):
                assert np.array_equal(one, other)

    def test_of_long_documents_mixes_blocks_only_within_themselves(self) -> None:
        plan = plan_of(np.full(40_000, 256))
        assert plan.blocks == 40_000 // BLOCK_SEQUENCES
        assert [plan.locate(n)[:2] for n in (0, plan.sequences_per_epoch)] == [(0, 0), (1, 0)]


def reference(sizes: list[int], length: int) -> list[list[int]]:
    """Best-fit decreasing, plainly: rooms of equal size are used latest first."""
    bins: list[list[int]] = []
    changed: list[int] = []  # bins, in the order in which something was last put there
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rooms = [(length - sum(sizes[i] for i in bins[b]), -changed.index(b), b) for b in changed]
        fitting = [room for room in rooms if room[0] >= sizes[index]]
        if fitting:
            chosen = min(fitting)[2]
            changed.remove(chosen)
        else:
            chosen = len(bins)
            bins.append([])
        bins[chosen].append(index)
        changed.append(chosen)
    return bins


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(31, 60))
def test_pieces_are_shared_out_as_the_plain_version_does(sizes: list[int], length: int) -> None:
    expected = reference(sizes, length)
    room = len(expected) * 2  # so many sequences that none has to be taken apart, but for the one that fills the last
    pieces = packed(np.array(sizes), room, length)
    found: dict[int, list[int]] = {}
    for sequence, document in zip(pieces.sequence.tolist(), pieces.document.tolist(), strict=True):
        found.setdefault(sequence, []).append(document)
    whole = [sorted(documents) for documents in found.values()]
    assert sum(sorted(documents) in whole for documents in expected) >= len(expected) - 1


def test_documents_without_a_token_are_refused() -> None:
    with pytest.raises(PingLlmError, match="empty"):
        plan_of([0, 0])
