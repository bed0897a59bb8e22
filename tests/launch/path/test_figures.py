"""Figures of commands, by what they print as JSON."""

from __future__ import annotations

from scaleray.launch.path.figures import figures_of


def test_each_kind_of_command_gives_its_figures():
    point = {"point": {"workers": 2, "samples_per_s": {"value": 700.0}}, "efficiency": {"value": 0.8}}
    assert figures_of({"curves": [{"points": [point]}]}) == {"efficiency on 2": 0.8, "samples/s on 2": 700.0}
    planned = {"num_layouts": 24, "curve": [{"num_gpus": 8, "samples_per_s": {"value": 9.5}, "efficiency": 0.9}]}
    assert figures_of(planned) == {"num_layouts": 24.0, "predicted samples/s on 8": 9.5}
    trial = {"batch_size": 64, "rule": "sqrt", "learning_rate": 0.002, "seed": 0, "metric": "acc", "value": 0.96}
    (name,) = figures_of({"trials": [trial]}).keys() - {"trials"}
    assert name == "batch 64, rule sqrt, learning rate 0.002, seed 0: acc"
    profiled = {"verdict": {"limit": "input", "primary": {"share": 0.3, "gain": 1.4}}}
    assert figures_of(profiled) == {"share of a step: input": 0.3, "speed-up without input": 1.4}
    check = {"what": "s per sample", "answer": "pass", "numbers": {"power": 0.9, "ratio": float("nan")}}
    assert figures_of({"gates": [{"gate": "speed", "checks": [check]}]}) == {"s per sample: power": 0.9}


def test_of_a_command_without_figures_there_are_none():
    assert figures_of({"gates": {"scaling": "pass"}, "verdict": "done", "steps": True, "metrics": None}) == {}
