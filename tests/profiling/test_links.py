"""Which link is named, from the bandwidths of all pairs."""

import pytest

from scaleray.profiling.links import slow_link
from scaleray.records.profile_record import LinkRow

SIZE = 2**16


def rows(rates):
    return [LinkRow(sender, receiver, rate, SIZE) for (sender, receiver), rate in rates.items()]


def both_ways(rates):
    return rows({**rates, **{(receiver, sender): rate for (sender, receiver), rate in rates.items()}})


@pytest.mark.parametrize(
    ("rates", "ranks"),
    [
        ({(0, 1): 1e9, (0, 2): 1e9, (1, 2): 0.9e9}, None),
        ({(0, 1): 1e9, (0, 2): 1e6, (1, 2): 1e9}, (0, 2)),
        ({(0, 1): 1e9, (0, 2): 1e8, (1, 2): 0.9e8}, (2,)),
        # rank 2 had less of the machine, but what is wrong is one of its links
        ({(0, 1): 1e9, (0, 2): 1e6, (1, 2): 4e8}, (0, 2)),
        ({(0, 1): 1e9}, None),
    ],
    ids=["alike", "a pair", "a rank", "a pair of a rank that is slow too", "two ranks"],
)
def test_a_pair_is_named_or_the_rank_whose_links_are_slow_alike(rates, ranks):
    found = slow_link(both_ways(rates))
    assert (found.ranks if found else None) == ranks


def test_a_link_that_is_slow_one_way_is_named_with_its_direction():
    rates = {(a, b): 1e9 for a in range(3) for b in range(3) if a != b}
    assert slow_link(rows({**rates, (2, 1): 1e7})).one_way == (2, 1)
