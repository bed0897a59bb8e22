"""A verdict of exposed communication names the ranks at a slow link, or says why nobody knows them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from scaleray.profiling.verdict.findings import Finding, Limit, Verdict
from scaleray.profiling.verdict.of_run import with_links
from scaleray.profiling.verdict.signals import Facts
from scaleray.records.profile_record import LinkRow

SLOW, FAST = 1e6, 1e8


def links(slow):
    ranks = [(a, b) for a in range(4) for b in range(4) if a != b]
    return [LinkRow(a, b, SLOW if {a, b} == slow else FAST, 2**20) for a, b in ranks]


def verdict(primary, *others):
    return Verdict(primary, others, "before", "sure", 30, 0.1)


COMMUNICATION = Finding(Limit.COMMUNICATION, 0.4, gain=1.6)
STRAGGLER = Finding(Limit.STRAGGLER, 0.5, gain=2.0, ranks=(1,))


def test_the_ranks_at_a_slow_link_stand_in_the_sentence():
    found = with_links(verdict(COMMUNICATION), SimpleNamespace(links=links({1, 3})), Facts(4, "ddp"))
    assert found.primary.ranks == (1, 3)
    assert (
        "exposed communication is the limit on ranks 1, 3 (the link of ranks 1 and 3 is slow: 1 MB/s" in found.sentence
    )


def test_a_slow_link_behind_another_limit_is_named_among_the_others():
    found = with_links(verdict(STRAGGLER, COMMUNICATION), SimpleNamespace(links=links({1, 3})), Facts(4, "ddp"))
    assert found.primary is STRAGGLER and found.others[0].ranks == (1, 3)
    assert "the link of ranks 1 and 3 is slow" in "\n".join(found.lines())


@pytest.mark.parametrize(
    ("rows", "workers", "words"),
    [
        ([], 4, "a run measures its pairs of ranks while"),
        (links(set()), 4, "none is slower than the others"),
        ([], 2, "two ranks"),
    ],
)
def test_where_nobody_knows_which_link_it_is_the_verdict_says_why(rows, workers, words):
    found = with_links(verdict(COMMUNICATION), SimpleNamespace(links=rows), Facts(workers, "ddp"))
    assert found.primary is COMMUNICATION and words in found.notes[-1]
    assert with_links(verdict(STRAGGLER), SimpleNamespace(links=rows), Facts(workers, "ddp")).notes == ()
