"""Blends: several sets of rows, each with its share."""

import re
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ping_llm.config import parse_blend
from ping_llm.core.errors import PingLlmError


def whole(pattern: str) -> tuple[tuple[str, Fraction], ...]:
    return ((pattern, Fraction(1)),)


@pytest.mark.parametrize("text", ["a/*.arrayrecord,0.3;b/*.arrayrecord,0.7", "a/*.arrayrecord:0.3;b/*.arrayrecord:0.7"])
def test_a_blend_gives_each_pattern_its_share(text: str) -> None:
    assert parse_blend(text) == (("a/*.arrayrecord", Fraction(3, 10)), ("b/*.arrayrecord", Fraction(7, 10)))


def test_shares_are_normalised_exactly() -> None:
    assert parse_blend("a,1;b,1;c,1") == tuple((name, Fraction(1, 3)) for name in "abc")
    assert parse_blend("a,0.1;b,0.2") == parse_blend("a,1;b,2") == parse_blend("a:1e9;b:2E+9")
    assert parse_blend("a,.5;b,5.e-1") == (("a", Fraction(1, 2)), ("b", Fraction(1, 2)))


def test_one_pattern_is_the_whole_blend_with_or_without_a_weight() -> None:
    assert (
        parse_blend("data/rows") == parse_blend("data/rows,0.3") == parse_blend(" data/rows : 7 ") == whole("data/rows")
    )


def test_spaces_around_patterns_and_weights_are_ignored() -> None:
    assert parse_blend("  a b/* , 1 ;\n c : 3 ") == (("a b/*", Fraction(1, 4)), ("c", Fraction(3, 4)))


@pytest.mark.parametrize(
    "pattern",
    ["gs://bucket/rows", "gs://bucket/rows-12:30/train*", r"C:\rows\train*", "C:/rows", "C:rows", "s3://b/2024/*"],
)
def test_a_colon_inside_a_path_is_no_weight(pattern: str) -> None:
    assert parse_blend(pattern) == whole(pattern)
    for separator in ",:":
        assert parse_blend(f"{pattern}{separator}1;b:3") == ((pattern, Fraction(1, 4)), ("b", Fraction(3, 4)))


def test_a_name_that_ends_like_a_weight_is_kept_if_a_weight_follows() -> None:
    assert parse_blend("runs/12:30,1") == whole("runs/12:30")
    assert parse_blend("a,b/rows,1") == whole("a,b/rows")


def test_a_source_of_weight_zero_stays_in_the_blend() -> None:
    assert parse_blend("a,0;b,2") == (("a", Fraction(0)), ("b", Fraction(1)))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no files are given"),
        ("  ", "no files are given"),
        ("a,1;", "has an empty part"),
        ("a,1;;b,1", "has an empty part"),
        (";", "has an empty part"),
        (",1", "has no pattern"),
        (":1;b:1", "has no pattern"),
        ("a,x;b,1", "'x' in 'a,x' is not a weight"),
        ("a/*,b/*", "'b/*' in 'a/*,b/*' is not a weight"),
        ("rows:x;b:1", "'x' in 'rows:x' is not a weight"),
        ("a,;b,1", "'' in 'a,' is not a weight"),
        ("a,-1;b,2", "'-1' in 'a,-1' is not a weight"),
        ("a,nan;b,1", "'nan' in 'a,nan' is not a weight"),
        ("a,inf", "'inf' in 'a,inf' is not a weight"),
        ("a,1/3;b,1", "'1/3' in 'a,1/3' is not a weight"),
        ("a,1e999999999;b,1", "is not a weight"),
        ("a,0;b,0.0", "are all 0"),
        ("a,0", "are all 0"),
        ("a;b", "'a' has no weight"),
        ("a,1;b", "'b' has no weight"),
        ("a,1;b,2; a:3", "'a' is in the blend twice"),
    ],
)
def test_a_wrong_blend_is_refused_with_the_part_that_is_wrong(text: str, complaint: str) -> None:
    with pytest.raises(PingLlmError, match=re.escape(complaint)):
        parse_blend(text)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{2,6}(/[a-z*.]{1,8})?", fullmatch=True),
        st.decimals(0, 10**6, places=4).map(lambda weight: format(weight, "f")),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(",:"),
)
def test_shares_sum_to_one_and_keep_their_proportions(weights: dict[str, str], separator: str) -> None:
    exact = {pattern: Fraction(weight) for pattern, weight in weights.items()}
    assume(sum(exact.values()) > 0)
    blend = parse_blend(";".join(f"{pattern}{separator}{weight}" for pattern, weight in weights.items()))
    assert [pattern for pattern, _ in blend] == list(weights)
    assert sum(share for _, share in blend) == 1
    assert all(share * sum(exact.values()) == exact[pattern] for pattern, share in blend)
