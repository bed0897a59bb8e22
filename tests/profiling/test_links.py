"""The slow one among the links between ranks is named; where nobody can know, it is said why."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from scaleray.profiling.links import in_words, slow_link, why_not
from scaleray.records.profile import LinkRow

FAST, SLOW = 1e8, 2e6


def rows(num_ranks, slow):
    """Each pair of ranks both ways. slow: whether a way is."""
    pairs = itertools.permutations(range(num_ranks), 2)
    return [LinkRow(a, b, SLOW if slow(a, b) else FAST * (1 + 0.1 * (a + b)), 2**20) for a, b in pairs]


@pytest.mark.parametrize("num_ranks", [3, 4, 8])
def test_a_slow_pair_is_named_with_its_bandwidth_beside_the_others(num_ranks):
    found = slow_link(rows(num_ranks, lambda a, b: {a, b} == {0, 2}))
    assert (found.ranks, found.bytes_per_s, found.one_way) == ((0, 2), SLOW, None)
    assert found.usual >= FAST
    assert in_words(found).startswith("the link of ranks 0 and 2 is slow: 2 MB/s, where the others carry")


def test_a_link_that_is_slow_one_way_is_named_with_that_way():
    found = slow_link(rows(4, lambda a, b: (a, b) == (3, 1)))
    assert (found.ranks, found.one_way) == ((1, 3), (3, 1))
    assert in_words(found).startswith("the link from rank 3 to rank 1 is slow: 2 MB/s")


@pytest.mark.parametrize("num_ranks", [3, 4, 8])
def test_a_rank_whose_links_are_all_slow_is_named_alone(num_ranks):
    found = slow_link(rows(num_ranks, lambda a, b: 1 in (a, b)))
    assert found.ranks == (1,) and found.bytes_per_s == SLOW
    assert in_words(found).startswith("all links of rank 1 are slow")


@pytest.mark.parametrize(
    ("links", "num_ranks", "words"),
    [
        (rows(4, lambda a, b: False), 4, "none more than the others, which carry 110 MB/s to 150 MB/s"),
        (rows(4, lambda a, b: True), 4, "none more than the others"),
        (rows(2, lambda a, b: True), 2, "two ranks have one"),
        ([], 4, "scaleray profile -c FILE does"),
    ],
    ids=["alike", "all slow", "two ranks", "not measured"],
)
def test_where_no_link_is_named_it_is_said_why(links, num_ranks, words):
    assert slow_link(links) is None
    assert words in why_not(links, num_ranks)


def test_links_within_a_factor_of_two_are_alike():
    links = rows(4, lambda a, b: False)
    assert slow_link([dataclasses.replace(links[0], bytes_per_s=0.8 * FAST), *links[1:]]) is None
