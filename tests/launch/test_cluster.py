"""What is refused before Ray would wait for ever, and who may share a machine."""

from __future__ import annotations

import pytest

from scaleray.config import load_config
from scaleray.errors import ClusterError
from scaleray.launch.cluster import Node, check_capacity, input_cpus

MINIMAL = {"workload.name": "x:Y", "batch.global_size": 64, "optimizer.learning_rate": 0.1, "stop.after": "1 steps"}


def config(**options):
    return load_config(flags={**MINIMAL, **options}, environ={})


def node(cpus, gpus=0, **labels):
    return Node("10.0.0.1", {"CPU": cpus, "GPU": gpus}, labels)


def test_a_run_that_fits_passes():
    check_capacity(config(**{"scale.workers": 2}), [node(3)])


@pytest.mark.parametrize(
    ("options", "nodes", "words"),
    [
        ({"scale.workers": 4}, [node(3)], ["4 workers of 1 CPU", "1 node with 3 CPUs", "--scale.workers 2"]),
        ({"scale.workers": 3}, [node(3)], ["must stay free for the input", "--scale.workers 2"]),
        ({"scale.workers": 2, "scale.gpus_per_worker": 1}, [node(8, 1)], ["1 GPU", "can hold 1"]),
        ({"scale.workers": 2, "scale.cpus_per_worker": 3}, [node(4), node(2)], ["can hold 1"]),
        ({"scale.workers": 3, "scale.placement": "STRICT_PACK"}, [node(2), node(2)], ["STRICT_PACK", "can hold 2"]),
        ({"scale.workers": 3, "scale.placement": "STRICT_SPREAD"}, [node(8), node(8)], ["STRICT_SPREAD", "can hold 2"]),
        ({"scale.label_selector": {"zone": "z1"}}, [node(8, zone="z2")], ["{'zone': 'z1'}", "0 with these labels"]),
    ],
)
def test_a_run_that_can_never_fit_is_refused_with_both_sides(options, nodes, words):
    with pytest.raises(ClusterError) as caught:
        check_capacity(config(**options), nodes)
    for word in words:
        assert word in str(caught.value)


def test_following_the_advice_makes_the_run_fit():
    with pytest.raises(ClusterError, match=r"--scale\.workers 2"):
        check_capacity(config(**{"scale.workers": 4}), [node(3)])
    check_capacity(config(**{"scale.workers": 2}), [node(3)])


def test_input_tasks_share_the_reserved_cpus():
    assert input_cpus(config(**{"scale.workers": 4, "data.reserved_cpus": 1})) == 0.25
    assert input_cpus(config(**{"scale.workers": 4, "data.reserved_cpus": 0})) > 0
