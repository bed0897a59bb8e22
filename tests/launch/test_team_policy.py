"""A team's policy: each required field is refused by its name before anything starts, and a slip in the policy is one error."""

import pytest

from scaleray.config import load_config
from scaleray.errors import ConfigError
from scaleray.launch.session.experiment import check_policy, experiment_tags
from scaleray.launch.session.team_policy import read_team_policy
from scaleray.records.experiment import EXCEPTIONS, OWNER, PROFILED, PURPOSE, REQUIRED

CONFIG = {
    "workload.name": "work.py:Mine",
    "batch.global_size": 64,
    "optimizer.learning_rate": 0.1,
    "stop.after": "1 epoch",
}
FACTS = {"git": {"commit": "c0ffee", "is_dirty": False}, "cpu": {"model": "EPYC"}, "os": "Linux"}
KNOWN = dict.fromkeys((*REQUIRED, "gpus", "model", "strategy", "uncommitted"), "something")


def config_of(policy=None, **more):
    given = {} if policy is None else {"tracking.policy": str(policy)}
    return load_config(flags={**CONFIG, **given, **more}, environ={})


@pytest.fixture
def policy(tmp_path):
    """A policy file with this text."""

    def write(text):
        (tmp_path / "team.yaml").write_text(text)
        return tmp_path / "team.yaml"

    return write


def tags(config, *, facts=FACTS, data=None, workers=2, **more):
    nodes = [{"node": "local"}]
    return experiment_tags(
        config, environment=facts, nodes=nodes, data=data or {"sha256": "aa"}, workers=workers, **more
    )


def refused(call, *args, **more):
    with pytest.raises(ConfigError) as caught:
        call(*args, **more)
    return str(caught.value)


def test_without_a_policy_everything_is_told_and_nothing_asked():
    found = tags(config_of(**{"tracking.owner": "anna", "tracking.purpose": "a baseline"}))
    assert found == {
        OWNER: "anna", PURPOSE: "a baseline", "scaleray.hardware": "2 x EPYC", "scaleray.topology": "1 node, 2 workers",
    }  # fmt: skip
    assert tags(config_of(), profiled=True)[PROFILED] == "true"
    check_policy(config_of())


@pytest.mark.parametrize("field", REQUIRED)
def test_each_field_may_be_required_and_its_lack_is_refused_by_its_name_and_line(policy, field):
    team = read_team_policy(policy(f"# ours\ninvariants:\n  {field}: required\n"))
    assert team.check(KNOWN, reason=None) == []
    message = refused(team.check, {**KNOWN, field: None}, reason="none counts")
    assert f"team.yaml:3 {field} is required: an invariant" in message


def test_what_the_config_alone_shows_is_refused_before_anything_is_started(policy):
    message = refused(check_policy, config_of(policy("invariants:\n  purpose: required\n")))
    assert "team.yaml:2 purpose is required" in message and "--tracking.purpose" in message
    message = refused(check_policy, config_of(policy("invariants:\n  global_batch: {max: 32}\n")))
    assert "requires at most 32" in message
    check_policy(config_of(policy("invariants:\n  data_hash: required\n")))  # not known yet


def test_what_only_the_machine_shows_is_refused_before_workers_start(policy):
    config = config_of(policy("invariants:\n  uncommitted: false\n  data_hash: required\n"))
    changed = {**FACTS, "git": {"commit": "c0ffee", "is_dirty": True}}
    assert "team.yaml:2 uncommitted is True: an invariant of the team's policy requires false" in refused(
        tags, config, facts=changed
    )
    assert "team.yaml:3 data_hash is required" in refused(tags, config, data={"rows": 3})
    assert tags(config)["scaleray.policy"].startswith("team.yaml sha256:")


def test_a_constraint_may_be_broken_with_a_reason_which_is_recorded_and_an_invariant_may_not(policy):
    text = "constraints:\n  gpus: {max: 1}\n  rule: [linear, sqrt]\ninvariants:\n  seed: 0\n"
    path = policy(text)
    message = refused(tags, config_of(path))
    assert (
        "team.yaml:2 gpus is 2: a constraint of the team's policy requires at most 1" in message
        and "--tracking.policy-reason" in message
    )
    because = {"tracking.policy_reason": "the deadline"}
    broken = tags(config_of(path, **because))[EXCEPTIONS]
    assert broken.startswith("gpus is 2, not at most 1 (") and broken.count(": the deadline") == broken.count("; ") + 1
    assert "team.yaml:5 seed is 1" in refused(tags, config_of(path, seed=1, **because))


@pytest.mark.parametrize(
    ("wanted", "allowed", "broken"),
    [
        ("8", [8, "8", 8.0], [9, "eight", None, True]),
        ("sqrt", ["sqrt"], ["linear", None]),
        ("false", [False, "False"], [True, None, 0]),
        ("[linear, 2]", ["linear", 2, "2"], ["sqrt", 3, None]),
        ("{in: [linear]}", ["linear"], ["sqrt"]),
        ("{min: 2, max: 8}", [2, 8, "4"], [1, 9, "many", None, True]),
        ("{max: 1.5}", [-1, 1.5], [2, "1e4"]),
        ("{min: 2, in: [1, 4]}", [4], [1, 8]),
        ("required", [0, False, "x"], [None]),
    ],
)
def test_a_value_is_allowed_or_breaks_the_rule(policy, wanted, allowed, broken):
    [rule] = read_team_policy(policy(f"invariants:\n  rule: {wanted}\n")).rules
    assert [rule.holds(value) for value in allowed] == [True] * len(allowed)
    assert [rule.holds(value) for value in broken] == [False] * len(broken)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("invariants:\n  owners: required\n", "team.yaml:2 owners is an unknown field.*did you mean owner"),
        ("invariant:\n  owner: required\n", "team.yaml:1 invariant is an unknown section.*did you mean invariants"),
        ("invariants:\n  scale.worker: {max: 4}\n", "did you mean scale.workers"),
        ("invariants:\n  gpus: <= 4\n", "team.yaml:2 gpus.*bounds such as {min: 2, max: 64}"),
        ("invariants:\n  gpus: {most: 4}\n", "team.yaml:2 gpus.*bounds such as"),
        ("invariants:\n  gpus: {max: many}\n", "team.yaml:2 gpus.*bounds such as"),
        ("invariants:\n  gpus: {}\n", "team.yaml:2 gpus.*bounds such as"),
        ("invariants:\n  gpus: []\n", "team.yaml:2 gpus.*bounds such as"),
        ("invariants: [owner]\n", "team.yaml:1 invariants is not a mapping"),
        ("- owner\n", "it must have the sections invariants, constraints"),
        ("", "it must have the sections invariants, constraints"),
        ("invariants:\n  owner: [\n", "team.yaml:3.*not readable as YAML"),
    ],
)
def test_a_slip_in_the_policy_is_one_error_with_file_and_line(policy, text, message):
    found = refused(read_team_policy, policy(text))
    import re

    assert re.search(message, found, re.DOTALL), found


def test_a_policy_that_is_not_there_is_said(tmp_path):
    assert "does not exist" in refused(check_policy, config_of(tmp_path / "none.yaml"))
