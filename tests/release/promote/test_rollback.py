"""Which version an alias goes back to: by the order in which the alias was given, not by number."""

from __future__ import annotations

from scaleray.models.registry import GIVEN, WITHDRAWN, ModelVersion
from scaleray.release.promote.rollback import had_before


def versions(**given):
    """Versions by number, from v1=(given at, taken back at)."""
    found = {}
    for name, (at, back) in given.items():
        tags = {f"{GIVEN}champion": f"{at} me"} if at else {}
        tags |= {f"{WITHDRAWN}champion": f"{back} me"} if back else {}
        found[int(name[1:])] = ModelVersion("digits", int(name[1:]), "", "", tags)
    return found


def test_the_version_that_had_the_alias_last_comes_first():
    known = versions(v1=(10, 0), v2=(20, 0), v3=(30, 0), v4=(0, 0))
    assert had_before(known, known[3], "champion") == [2, 1]
    assert had_before(known, known[1], "champion") == []


def test_a_version_from_which_the_alias_was_taken_back_is_left_out():
    # 1, then 2, back to 1 at 30, then 3: version 2 was withdrawn, although its number is the next lower one
    known = versions(v1=(30, 0), v2=(20, 30), v3=(40, 0))
    assert had_before(known, known[3], "champion") == [1]


def test_a_version_that_was_promoted_again_after_it_was_taken_back_counts_again():
    known = versions(v1=(30, 0), v2=(50, 30), v3=(60, 0))
    assert had_before(known, known[3], "champion") == [2, 1]


def test_from_a_version_that_was_named_by_hand_it_goes_back_to_the_one_that_was_given_last():
    known = versions(v1=(10, 0), v2=(20, 0), v3=(0, 0))
    assert had_before(known, known[3], "champion") == [2, 1]
