"""Documents to sequences, and records to documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_fixtures import example
from ping_llm.batches.batch import expand
from ping_llm.data.documents import RecordError, int_feature, text_feature
from ping_llm.data.stream import EMPTY, Concatenated, Packed, joined, pack

sizes_of_documents = st.lists(st.integers(0, 40), max_size=30)


def concatenated(sizes: list[int]) -> Concatenated:
    return Concatenated.of(np.arange(1, sum(sizes) + 1, dtype=np.uint32), np.array(sizes, dtype=np.int64))


def sequences(sizes: list[int], length: int) -> list[Packed]:
    whole = concatenated(sizes)
    return [whole.cut(begin, begin + length) for begin in range(0, sum(sizes), length)]


@given(sizes=sizes_of_documents, length=st.integers(1, 25))
def test_sequences_hold_all_tokens_in_order_and_only_the_last_is_not_full(sizes: list[int], length: int) -> None:
    cut = sequences(sizes, length)
    assert np.array_equal(np.concatenate([EMPTY[0], *(tokens for tokens, _ in cut)]), np.arange(1, sum(sizes) + 1))
    assert all(len(tokens) == length for tokens, _ in cut[:-1])
    tokens, segments = concatenated(sizes).cut(sum(sizes), sum(sizes) + length)
    assert len(tokens) == len(segments) == 0


@given(sizes=sizes_of_documents, length=st.integers(1, 25))
def test_segments_end_where_documents_or_sequences_end(sizes: list[int], length: int) -> None:
    ends = np.cumsum([size for _, segments in sequences(sizes, length) for size in segments])
    expected = {*np.cumsum(sizes).tolist(), *range(length, sum(sizes), length), sum(sizes)} - {0}
    assert ends.tolist() == sorted(expected)


@given(sizes=sizes_of_documents, limit=st.integers(1, 3))
def test_no_sequence_has_more_segments_than_allowed_or_tokens_behind_them(sizes: list[int], limit: int) -> None:
    for cut in sequences(sizes, 25):
        tokens, segments = joined([cut], limit)
        assert segments.tolist() == cut[1][:limit].tolist()
        assert tokens.tolist() == cut[0][: segments.sum()].tolist()


def test_a_batch_of_text_keeps_the_contract_with_tokens_above_16_bits() -> None:
    whole = Concatenated.of(np.array([70_000, 1, 2, 151_000, 4], np.uint32), np.array([3, 2]))
    batch = expand(pack([whole.cut(begin, begin + 4) for begin in (0, 4, 8)]), 3, 4)
    assert batch["inputs"].tolist() == [[70_000, 1, 2, 151_000], [4, 0, 0, 0], [0, 0, 0, 0]]
    assert batch["inputs_segmentation"].tolist() == [[1, 1, 1, 2], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert batch["inputs_position"].tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert batch["targets"].tolist() == [[1, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert batch["targets_segmentation"].tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


@given(text=st.binary(max_size=300), ids=st.lists(st.integers(0, 2**32), max_size=40), other=st.binary(max_size=200))
def test_features_of_examples_are_read_back(text: bytes, ids: list[int], other: bytes) -> None:
    record = example(url=other, text=text, ids=ids)
    assert text_feature(record, "text") == text.decode("utf-8", "replace")
    assert int_feature(record, "ids") == ids
    with pytest.raises(RecordError, match="it has no feature 'body', only ids, text, url"):
        text_feature(record, "body")


@given(st.binary(max_size=60))
def test_other_records_are_refused_and_nothing_else_happens(record: bytes) -> None:
    with pytest.raises(RecordError):
        text_feature(record, "text")
