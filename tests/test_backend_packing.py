"""Documents to sequences, and records to documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_fixtures import example
from ping_llm.batches.batch import expand
from ping_llm.data.text.arrayrecord import EMPTY, Laid, PackSettings, pack
from ping_llm.data.text.files import NotAnExampleError, int_feature, text_feature

sizes_of_documents = st.lists(st.integers(0, 40), max_size=30)


def laid(sizes: list[int], length: int, most_segments: int = 1000) -> Laid:
    tokens = np.arange(1, sum(sizes) + 1, dtype=np.uint32)
    return Laid.of(tokens, np.array(sizes, dtype=np.int64), PackSettings(length=length, most_segments=most_segments))


@given(sizes=sizes_of_documents, length=st.integers(1, 25))
def test_sequences_hold_all_tokens_in_order_and_only_the_last_is_not_full(sizes: list[int], length: int) -> None:
    whole = laid(sizes, length)
    parts = [whole.sequence(number) for number in range(whole.sequences)]
    assert np.array_equal(np.concatenate([EMPTY[0], *(tokens for tokens, _ in parts)]), whole.tokens)
    assert all(len(tokens) == length for tokens, _ in parts[:-1])
    assert not len(whole.sequence(whole.sequences)[0])


@given(sizes=sizes_of_documents, length=st.integers(1, 25))
def test_segments_end_where_documents_or_sequences_end(sizes: list[int], length: int) -> None:
    whole = laid(sizes, length)
    ends = np.cumsum([size for _, parts in map(whole.sequence, range(whole.sequences)) for size in parts])
    wanted = {*np.cumsum(sizes).tolist(), *range(length, sum(sizes), length), sum(sizes)} - {0}
    assert ends.tolist() == sorted(wanted)


@given(sizes=sizes_of_documents, length=st.integers(1, 25), used=st.floats(0, 1))
def test_what_is_left_is_laid_out_as_if_it_came_alone(sizes: list[int], length: int, used: float) -> None:
    whole = laid(sizes, length)
    tokens = int(used * len(whole.tokens))
    rest = whole.without(tokens)
    assert np.array_equal(rest.tokens, whole.tokens[tokens:])
    assert (rest.ends + tokens).tolist() == [end for end in whole.ends.tolist() if end > tokens]


@given(sizes=sizes_of_documents, most=st.integers(1, 3))
def test_no_sequence_has_more_segments_than_allowed(sizes: list[int], most: int) -> None:
    whole = laid(sizes, 25, most)
    for number in range(whole.sequences):
        tokens, segments = whole.sequence(number)
        assert len(segments) <= most
        assert len(tokens) == segments.sum()


def test_a_batch_of_text_keeps_the_contract_with_tokens_above_16_bits() -> None:
    whole = Laid.of(
        np.array([70_000, 1, 2, 151_000, 4], np.uint32), np.array([3, 2]), PackSettings(length=4, most_segments=9)
    )
    batch = expand(pack([whole.sequence(0), whole.sequence(1), whole.sequence(2)]), 3, 4)
    assert batch["inputs"].tolist() == [[70_000, 1, 2, 151_000], [4, 0, 0, 0], [0, 0, 0, 0]]
    assert batch["inputs_segmentation"].tolist() == [[1, 1, 1, 2], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert batch["inputs_position"].tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert batch["targets"].tolist() == [[1, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert batch["targets_segmentation"].tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


@given(text=st.binary(max_size=300), ids=st.lists(st.integers(0, 2**32), max_size=40), other=st.binary(max_size=200))
def test_features_of_examples_are_read_back(text: bytes, ids: list[int], other: bytes) -> None:
    record = example(url=other, text=text, ids=ids)
    assert text_feature(record, "text") == text
    assert int_feature(record, "ids") == ids
    with pytest.raises(NotAnExampleError, match="it has no feature 'body', only ids, text, url"):
        text_feature(record, "body")


@given(st.binary(max_size=60))
def test_other_records_are_refused_and_nothing_else_happens(record: bytes) -> None:
    with pytest.raises(NotAnExampleError):
        text_feature(record, "text")
