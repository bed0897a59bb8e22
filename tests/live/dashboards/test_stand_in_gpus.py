"""The stand-in for NVIDIA's exporter shows what dashboards and rules ask of a real one, and faults once they are planted."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from jobs.benchmarks.stand_in_gpus import FAULTS, GPUS, StandInGpus, exporting
from scaleray.live.foreign import GPU_ECC_DOUBLE_BIT, GPU_ENGINE_ACTIVE, GPU_THROTTLED, GPU_XID, OF_GPUS
from scaleray.live.rules.gpu_rules import IN_DCGM, RULES


def read(page):
    """Values by field and GPU."""
    families = text_string_to_metric_families(page)
    return {(sample.name, int(sample.labels["gpu"])): sample for family in families for sample in family.samples}


def test_every_field_of_the_dashboards_is_on_the_page_with_the_labels_that_rules_keep():
    with exporting(StandInGpus()) as port, urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        found = read(answer.read().decode())
    for metric in OF_GPUS:
        # the parser gives counters the ending of the newer format, which DCGM's names lack
        ending = "_total" if metric.kind == "counter" and not metric.name.endswith("_total") else ""
        assert {gpu for name, gpu in found if name in (metric.name, metric.name + ending)} == set(range(GPUS)), metric
    labels = set(IN_DCGM.split(", ")) - {"instance"}
    assert all(labels <= set(sample.labels) for sample in found.values())


def test_faults_are_of_one_gpu_each_and_for_rules_that_there_are(monkeypatch):
    assert set(FAULTS) == {rule.name for rule in RULES}
    gpus, now = StandInGpus(), 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    fields = [metric.name for metric in (GPU_ENGINE_ACTIVE, GPU_THROTTLED[1], GPU_ECC_DOUBLE_BIT, GPU_XID)]
    assert [gpus.value(name, gpu) for name, gpu in zip(fields, range(GPUS), strict=True)] == [0.9, 0.0, 0.0, 0.0]
    for rule in FAULTS:
        gpus.plant(rule)
    now += 10
    assert [gpus.value(name, gpu) for name, gpu in zip(fields, range(GPUS), strict=True)] == [0.02, 5e9, 1.0, 79.0]
    assert [gpus.value(name, gpu) for name, gpu in zip(fields, (1, 2, 3, 0), strict=True)] == [0.9, 0.0, 0.0, 0.0]
