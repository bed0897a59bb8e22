"""What a measurement teaches: the compute from the smallest point, the node's link from the next, and slips in one message."""

from dataclasses import replace

import pytest
import study_examples

from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.errors import ConfigError, UsageError
from scaleray.planner.answers.calibration import calibrate_link
from scaleray.planner.answers.measurement import Measurement, measurement_of, read_measurement
from scaleray.planner.cost.block_pass import Measured
from scaleray.planner.cost.communication import bus_bytes_per_s
from scaleray.planner.cost.layout import Layout, group_of
from scaleray.planner.cost.step_time import step_time
from scaleray.planner.models.names import find_model

GPT = find_model("gpt2")
NODE = parse_cluster("a100-80:8")


def curve(mode, seconds_by_workers):
    example = study_examples.curve(mode, tuple(seconds_by_workers))
    points = [
        replace(
            at,
            point=replace(
                at.point,
                strategy="ddp" if at.point.workers > 1 else "single",
                micro_batch_size=4,
                accumulation_steps=2,
                step_time_s=study_examples.about(seconds_by_workers[at.point.workers]),
            ),
        )
        for at in example.points
    ]
    return replace(example, points=points)


def test_the_smallest_point_of_a_study_is_read_with_the_next_one(tmp_path):
    record = replace(study_examples.study(), curves=[curve("strong", {4: 0.3, 1: 0.2}), curve("weak", {2: 0.25})])
    (tmp_path / "record.json").write_text(record.to_json())
    found = read_measurement(tmp_path)
    assert (found.num_gpus, found.step_time_s, found.layout.accumulation) == (1, 0.2, 2)
    assert (found.larger.num_gpus, found.larger.step_time_s, found.larger.layout.data) == (2, 0.25, 2)


def test_a_link_is_found_again_from_the_step_that_it_makes():
    layout = Layout(data=8, micro_batch=1, gradient_bytes=4, overlaps_data=False)
    slow = replace(NODE, link=replace(NODE.link, bus_gb_per_s=7.5))
    seconds = step_time(GPT, layout, slow).total_s
    assert calibrate_link(GPT, layout, NODE, seconds, measured=Measured()).bus_gb_per_s == pytest.approx(7.5, rel=1e-3)


def test_two_points_calibrate_compute_and_link():
    layout = Layout(micro_batch=1, accumulation=1)
    found = Measurement(step_time_s=0.1, num_gpus=1, layout=layout)
    measured, cluster = measurement_of(found, GPT, NODE, precision="bf16", fused_attention=True)
    assert cluster is NODE and measured.compute_scale > 1
    both = replace(found, larger=Measurement(step_time_s=0.3, num_gpus=8, layout=replace(layout, data=8)))
    again, slower = measurement_of(both, GPT, NODE, precision="bf16", fused_attention=True)
    assert again == measured and slower.link.bus_gb_per_s < NODE.link.bus_gb_per_s / 5


def test_a_measurement_must_fit_on_a_node_of_the_plan():
    found = Measurement(step_time_s=0.1, num_gpus=16, layout=Layout(data=16))
    with pytest.raises(ConfigError, match="16 workers"):
        measurement_of(found, GPT, NODE, precision="bf16", fused_attention=True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        study_examples.run_record(step_time_s=None).to_json(),
        '{"workers": 1}',
        '{"curves": [{"points": [{}]}]}',
    ],
)
def test_what_is_no_record_is_one_message(tmp_path, text):
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="--from-run"):
        read_measurement(path)


def test_workers_of_one_host_share_its_memory():
    gpu = CATALOGUE.find_gpu("cpu")
    host = replace(NODE, gpu=gpu, link=CATALOGUE.find_link(gpu.link), board_gpus=0)
    two, eight = (bus_bytes_per_s(group_of(host, n, 1, num_gpus=n), host) for n in (2, 8))
    assert two == pytest.approx(4 * eight)
