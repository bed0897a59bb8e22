"""Every pair once, nobody twice in a round; and the slow link is told from the slow end."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from emulated_nodes import NAMES, found, healthy, not_green
from hypothesis import given
from hypothesis import strategies as st

from scaleray.clusters.preflight.tournament import partner_of, rounds_of, slow_links
from scaleray.records.doctor_record import LinkRate


@given(st.integers(0, 70))
def test_every_pair_meets_once_in_rounds_of_disjoint_pairs(num_ends):
    rounds = rounds_of(num_ends)
    pairs = [pair for one in rounds for pair in one]
    assert sorted(pairs) == list(itertools.combinations(range(num_ends), 2))
    assert all(len({end for pair in one for end in pair}) == 2 * len(one) for one in rounds)
    assert len(rounds) == (0 if num_ends < 2 else num_ends - 1 + num_ends % 2)


@given(st.integers(2, 20))
def test_partners_agree_in_every_round(num_ends):
    for pairs in rounds_of(num_ends):
        for end in range(num_ends):
            other = partner_of(end, pairs)
            assert other is None or (other != end and partner_of(other, pairs) == end)


def links(num_ends, *, slow_pairs=(), slow_ends=()):
    return [
        LinkRate(
            one=f"n{a}",
            other=f"n{b}",
            is_between_nodes=True,
            bytes_per_s=(1e8 if (a, b) in slow_pairs or {a, b} & {*slow_ends} else 1e9)
            * (1 + 0.01 * ((a * 7 + b) % 5)),
        )
        for a, b in itertools.combinations(range(num_ends), 2)
    ]


def test_links_that_are_alike_are_not_slow():
    slow = slow_links(links(6), below=0.7)
    assert not slow.ends and not slow.links and slow.share > 0.9


@pytest.mark.parametrize("num_ends", [3, 4, 8])
def test_one_slow_link_is_named_and_neither_of_its_ends(num_ends):
    slow = slow_links(links(num_ends, slow_pairs=[(0, 2)]), below=0.7)
    assert slow.ends == [] and [(pair.one, pair.other) for pair in slow.links] == [("n0", "n2")]


@pytest.mark.parametrize("num_ends", [4, 8, 33])
def test_an_end_that_is_slow_with_everybody_is_named_instead_of_its_links(num_ends):
    slow = slow_links(links(num_ends, slow_ends=[1]), below=0.7)
    assert slow.ends == ["n1"] and slow.links == []


def test_two_slow_ends_and_a_slow_link_are_told_apart():
    slow = slow_links(links(9, slow_ends=[1, 5], slow_pairs=[(2, 3)]), below=0.7)
    assert sorted(slow.ends) == ["n1", "n5"] and [pair.name for pair in slow.links] == ["n2 - n3"]


def test_of_three_nodes_one_of_which_is_slow_the_slow_one_is_named():
    slow = slow_links(links(3, slow_ends=[2]), below=0.7)
    assert slow.ends == ["n2"] and slow.links == []


def test_one_link_alone_is_not_slow():
    assert slow_links(links(2), below=0.7).share == 1.0 and not slow_links([], below=0.7).links


@pytest.mark.parametrize(("share", "verdict"), [(0.5, "yellow"), (0.1, "red"), (0.8, None)])
def test_a_slow_link_of_a_cluster_is_named_with_its_rate(share, verdict):
    measured = healthy()
    pairs = [
        replace(pair, bytes_per_s=share * pair.bytes_per_s) if {pair.one, pair.other} == {NAMES[0], NAMES[3]} else pair
        for pair in measured.links.pairs
    ]
    measured = replace(measured, links=replace(measured.links, pairs=pairs))
    assert not_green(measured) == ({"links between nodes": verdict} if verdict else {})
    assert (f"{NAMES[0]} - {NAMES[3]} at" in found(measured, "links between nodes").found) == bool(verdict)


def test_rounds_that_there_was_no_time_for_are_said():
    measured = healthy()
    measured = replace(measured, links=replace(measured.links, rounds=2))
    assert "2 of 3 rounds, for lack of time" in found(measured, "links between nodes").found
