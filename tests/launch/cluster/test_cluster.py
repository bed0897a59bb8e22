"""What is refused before Ray would wait for ever, and who may share a machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from scaleray.config import load_config
from scaleray.errors import ClusterError
from scaleray.launch.cluster.capacity import check_capacity
from scaleray.launch.cluster.connection import Node, input_cpus

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
        (
            {"scale.workers": 3},
            [node(3)],
            ["must stay free for the input", "--scale.workers 2", "--data.reserved-cpus 0"],
        ),
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


def test_input_tasks_use_every_cpu_that_the_workers_leave_on_any_node():
    of_two = config(**{"scale.workers": 2, "scale.cpus_per_worker": 2, "data.reserved_cpus": 1})
    assert input_cpus(of_two, [node(4)]) == 0.5  # none is left, which the check of capacity refuses
    assert input_cpus(of_two, [node(6)]) == 1
    assert input_cpus(of_two, [node(6), node(8), node(8)]) == 9


AFTER_RAY = """
import ray
from ray._raylet import get_authentication_mode, AuthenticationMode
from scaleray.launch.cluster.connection import set_auth_mode
if {is_connected}:
    ray.is_initialized = lambda: True
set_auth_mode()
print(get_authentication_mode() == AuthenticationMode.TOKEN)
"""


@pytest.mark.always("[True]")
@pytest.mark.parametrize("is_connected", [False, True])
def test_a_script_that_imports_ray_first_talks_to_our_cluster_with_its_token(is_connected):
    # Ray reads the mode when it is imported; without it the driver could not reach the head that it starts
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    command = [sys.executable, "-c", AFTER_RAY.format(is_connected=is_connected)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(not is_connected), "a connection that is there keeps its mode"
