"""Nodes that a cluster starts only when they are asked for are waited for, up to a deadline."""

import contextlib
from functools import partial
from pathlib import Path

import pytest

from scaleray.config import load_config
from scaleray.errors import ClusterError
from scaleray.launch.cluster import awaited_nodes
from scaleray.launch.cluster.connection import Node
from scaleray.studies import hardware
from scaleray.verification import preparation
from scaleray.verification.verify_options import VerifyOptions

MINIMAL = {"workload.name": "x:Y", "batch.global_size": 64, "optimizer.learning_rate": 0.1, "stop.after": "1 steps"}


def config(**options):
    return load_config(flags={**MINIMAL, "scale.workers": 3, **options}, environ={})


def node(cpus, **labels):
    return Node("10.0.0.1", {"CPU": cpus}, labels)


@pytest.fixture
def asked(monkeypatch):
    """What the autoscaler was asked for, in turn; time passes by looks."""
    now, requests = [0.0], []
    monkeypatch.setattr(awaited_nodes.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(awaited_nodes.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr("ray.autoscaler.sdk.request_resources", lambda **what: requests.append(what))
    return requests


def growing(*sizes):
    """A cluster that has so many nodes of 2 CPUs at each look."""
    looks = iter(sizes)
    last = [0]

    def look():
        last[0] = next(looks, last[0])
        return [node(2)] * last[0]

    return look


def test_a_run_waits_until_there_is_room_and_takes_its_question_back(asked):
    options = {"scale.wait_for_nodes_s": 60, "data.reserved_cpus": 1}
    assert len(awaited_nodes.nodes_for(config(**options), look=growing(0, 1, 1, 2))) == 2
    assert asked == [{"bundles": [{"CPU": 1.0}] * 4}, {"bundles": []}]


def test_a_run_that_has_room_asks_for_nothing(asked):
    assert len(awaited_nodes.nodes_for(config(**{"scale.wait_for_nodes_s": 60}), look=growing(2))) == 2
    assert asked == []


def test_without_a_time_to_wait_nothing_is_asked_or_waited_for(asked):
    assert awaited_nodes.nodes_for(config(), look=growing(0, 5)) == [] and asked == []


def test_at_the_deadline_one_error_says_what_there_is(asked):
    with pytest.raises(ClusterError) as caught:
        awaited_nodes.nodes_for(config(**{"scale.wait_for_nodes_s": 10}), look=growing(0, 1))
    for words in ("3 workers of 1 CPU", "1 node with 2 CPUs", "after 10 s of waiting", "ray status"):
        assert words in str(caught.value)
    assert asked[-1] == {"bundles": []}


def test_an_option_that_gave_the_number_of_workers_is_what_the_error_is_about(asked):
    with pytest.raises(ClusterError, match=r"--workers-per-trial is 3, which needs 3 workers of 1 CPU.*") as caught:
        awaited_nodes.nodes_for(
            config(**{"scale.wait_for_nodes_s": 10}), option="--workers-per-trial", look=growing(0, 1)
        )
    assert "after 10 s of waiting" in str(caught.value) and "--scale.workers" not in str(caught.value)


@pytest.mark.parametrize(("oversubscribe", "workers"), [(False, 4), (True, 2)])
def test_a_study_waits_for_its_largest_size_or_where_cores_are_shared_its_smallest(
    asked, monkeypatch, oversubscribe, workers
):
    monkeypatch.setattr(hardware, "nodes_for", partial(awaited_nodes.nodes_for, look=growing(0, 1, 2)))
    options = config(**{"scale.wait_for_nodes_s": 60, "data.reserved_cpus": 0})
    found = hardware.nodes_of(options, [2, 4], Nothing(), oversubscribe=oversubscribe)
    assert len(found) == workers / 2
    assert asked[0] == {"bundles": [{"CPU": 1.0}] * workers}


class Nothing:
    """A workload whose model does not sleep."""

    def build_model(self):
        from torch import nn

        return nn.Linear(1, 1)


@pytest.fixture
def verified(asked, monkeypatch, tmp_path, uri):
    """Prepares to verify on up to 16 workers, for which two of the nodes are needed; gives its plan by number of workers."""
    monkeypatch.setattr(preparation, "connected_unless", lambda config, *, local: contextlib.nullcontext())
    line = {"workload.name": f"{Path(__file__).parents[1] / 'workloads.py'}:Line", "tracking.uri": uri}
    wanted = config(**line, **{"scale.wait_for_nodes_s": 10, "checkpoint.storage_path": str(tmp_path)})
    question = VerifyOptions("all", world_sizes=(1, 16), accumulation=(1,), steps=2)

    def prepare(*sizes):
        monkeypatch.setattr(preparation, "nodes_for", partial(awaited_nodes.nodes_for, look=growing(*sizes)))
        with preparation.prepared(wanted, question, None, base_dir=None, say=print) as ready:
            return ready.plan.groups

    return prepare


@pytest.mark.combination
def test_verify_waits_for_its_largest_size_whose_workers_share_cores(asked, verified):
    assert set(verified(0, 1, 2)) == {1, 16}
    assert asked == [{"bundles": [{"CPU": 0.25}] * 16}, {"bundles": []}]


def test_verify_is_refused_at_the_deadline(verified):
    with pytest.raises(ClusterError, match=r"--world-sizes is 16, which needs 16 workers of 0\.25 CPU") as caught:
        verified(0, 1)
    assert "can hold 8 after 10 s of waiting" in str(caught.value)


def test_gpus_and_labels_are_asked_for_as_well(asked):
    options = {"scale.wait_for_nodes_s": 1, "scale.gpus_per_worker": 1, "scale.label_selector": {"zone": "z1"}}
    with pytest.raises(ClusterError):
        awaited_nodes.nodes_for(config(**options, **{"scale.workers": 2, "data.reserved_cpus": 1}), look=growing(0))
    assert asked[0] == {
        "bundles": [{"CPU": 1.0, "GPU": 1.0}] * 2 + [{"CPU": 1.0}],
        "bundle_label_selectors": [{"zone": "z1"}, {"zone": "z1"}, {}],
    }


def test_an_elastic_run_starts_with_its_fewest_workers_and_asks_for_all(asked):
    options = {"scale.workers": {"min": 1, "max": 3}, "scale.wait_for_nodes_s": 60, "data.reserved_cpus": 0}
    assert len(awaited_nodes.nodes_for(config(**options), look=growing(0, 1))) == 1
    assert asked[0] == {"bundles": [{"CPU": 1.0}] * 3}


def test_workers_of_one_node_are_asked_for_as_one(asked):
    options = {"scale.placement": "STRICT_PACK", "scale.wait_for_nodes_s": 1, "scale.label_selector": {"zone": "z1"}}
    with pytest.raises(ClusterError):
        awaited_nodes.nodes_for(config(**options, **{"data.reserved_cpus": 1}), look=growing(0))
    assert asked[0] == {"bundles": [{"CPU": 3.0}, {"CPU": 1.0}], "bundle_label_selectors": [{"zone": "z1"}, {}]}


@pytest.mark.parametrize(
    ("labels", "more"), [({}, {}), ({"zone": "z1"}, {"bundle_label_selector": [{"zone": "z1"}] * 3})]
)
def test_workers_of_a_node_each_are_asked_for_as_a_group_that_is_given_back(asked, monkeypatch, labels, more):
    made, removed = [], []

    def placement_group(bundles, **how):
        made.append((bundles, how))
        return "the group"

    monkeypatch.setattr("ray.util.placement_group", placement_group)
    monkeypatch.setattr("ray.util.remove_placement_group", removed.append)
    options = {"scale.placement": "STRICT_SPREAD", "scale.wait_for_nodes_s": 10, "scale.label_selector": labels}
    large = [node(8, **labels)]
    with pytest.raises(ClusterError, match="can hold 1 after 10 s"):
        awaited_nodes.nodes_for(config(**options), look=lambda: large)
    assert made == [([{"CPU": 1.0}] * 3, {"strategy": "STRICT_SPREAD", **more})] and removed == ["the group"]
    found = awaited_nodes.nodes_for(config(**options), look=lambda: large * 3)
    assert len(found) == 3 and len(made) == 1  # there is room: nothing is asked
