"""The FLOPs of a sample are counted beside a run, where somebody can make something of them."""

import io
import json
import pickle
import threading
from types import SimpleNamespace

import pytest
from small_runs import Classify, make_job
from waiting import wait_until

from scaleray.config.precision import PrecisionSettings
from scaleray.launch.run import run_flop_count as module
from scaleray.launch.run.run_flop_count import counted_flops
from scaleray.records.published import CountedFlops
from scaleray.records.run_record import EventRecord

PEAK = {"study.peak_tflops": 1.0}


class CannotBeBuilt(Classify):
    def build_model(self):
        raise ValueError("no such layer")


def counted(workload, flags):
    """What a run is told while it goes on."""
    job, sources = make_job(workload, flags)
    told = []
    with counted_flops(job, sources, told.extend):
        wait_until(lambda: told, seconds=120)
    return told


@pytest.mark.combination
def test_a_linear_network_costs_six_flops_for_each_weight_of_which_the_input_needs_none_back():
    (found,) = counted(Classify(), PEAK)
    assert found == CountedFlops(6 * (6 * 8 + 8 * 3) - 2 * 6 * 8)


@pytest.mark.combination
def test_what_cannot_be_counted_is_said_with_its_reason_and_the_run_goes_on():
    workload = Classify()
    workload.lock = threading.Lock()  # does not travel
    (found,) = counted(workload, PEAK)
    assert isinstance(found, EventRecord) and "cannot pickle '_thread.lock' object" in found.text
    assert found.text.endswith("set monitoring.flops_per_sample")


def test_the_process_says_why_it_cannot_count(monkeypatch, capsys):
    given = pickle.dumps((CannotBeBuilt(), Classify().datasets()["train"], PrecisionSettings(), False))
    monkeypatch.setattr(module.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(given)))
    monkeypatch.setattr(module.os, "nice", lambda by: None)
    assert module.main() == 0
    assert "build_model() failed" in json.loads(capsys.readouterr().out)["problem"]


@pytest.mark.parametrize("flags", [{}, {**PEAK, "monitoring.flops_per_sample": 9.0}], ids=["no peak", "given"])
def test_nothing_is_started_where_no_utilisation_comes_of_it_or_the_flops_are_given(flags, monkeypatch):
    monkeypatch.setattr(module.subprocess, "Popen", lambda *about, **more: pytest.fail("a process was started"))
    job, sources = make_job(Classify(), flags)
    before = threading.active_count()
    with counted_flops(job, sources, pytest.fail):
        assert threading.active_count() == before


@pytest.mark.combination
def test_a_run_that_ends_before_they_are_counted_ends_their_process_and_hears_nothing(monkeypatch):
    started, told = [], []
    popen = module.subprocess.Popen
    monkeypatch.setattr(module.subprocess, "Popen", lambda *a, **more: started.append(popen(*a, **more)) or started[0])
    job, sources = make_job(Classify(), PEAK)
    with counted_flops(job, sources, told.extend):
        wait_until(lambda: started)
    started[0].wait(timeout=60)
    wait_until(lambda: not any(thread.name == "scaleray-flops" for thread in threading.enumerate()), seconds=60)
    assert told == []
