"""A run that keeps an average of its weights leaves both, and whoever reads them may choose."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import scaleray
from scaleray.checkpoints.model_layout import TRAINED_WEIGHTS
from scaleray.cli.main import run_command
from scaleray.errors import UsageError
from scaleray.training.state.final_weight_files import read_weights


@pytest.fixture(scope="module")
def averaged(trained):
    """The record of the same training with an average."""
    config = {**trained.config, "averaging": {"decay": 0.8}}
    config["tracking"] = {**config["tracking"], "run_name": "averaged"}
    return scaleray.train(config, local=True)


def same(module, weights):
    own = module.state_dict()
    return own.keys() == weights.keys() and all(torch.equal(own[name], weights[name]) for name in own)


def final(record):
    """The average and the trained weights in the run folder."""
    return read_weights(record.run_dir), read_weights(record.run_dir, TRAINED_WEIGHTS)


@pytest.mark.combination
def test_both_are_in_the_run_folder_and_the_trained_ones_are_those_of_a_run_without(averaged, trained):
    average, weights = final(averaged)
    plain = read_weights(trained.run_dir)
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    assert not any(torch.equal(average[name], plain[name]) for name in plain)
    assert not (Path(trained.run_dir) / "trained_weights.pt").exists()


@pytest.mark.parametrize("where", ["folder", "MLflow"])
def test_load_gives_the_average_unless_the_trained_ones_are_asked_for(averaged, where, tmp_path):
    average, weights = final(averaged)
    away = Path(shutil.move(averaged.run_dir, tmp_path / "away")) if where == "MLflow" else None
    try:
        run, uri = averaged.run_id, averaged.tracking_uri
        first = scaleray.load(run, uri=uri)
        assert same(first.module, average) and first.words == "the final averaged weights of averaged"
        assert same(scaleray.load(run, uri=uri, weights="averaged").module, average)
        assert same(scaleray.load(run, uri=uri, weights="trained").module, weights)
    finally:
        if away is not None:
            shutil.move(away, averaged.run_dir)


def test_checkpoints_have_both(averaged):
    average, weights = final(averaged)
    run, last = averaged.run_dir, averaged.steps
    assert same(scaleray.load(run, step=last).module, average)
    assert same(scaleray.load(run, step=last, weights="trained").module, weights)
    early = scaleray.load(run, step=8, weights="trained")
    assert early.words == "the trained weights after step 8 of averaged"
    assert not same(early.module, scaleray.load(run, step=8).module.state_dict())


def test_evaluations_are_of_the_average_unless_the_trained_ones_are_asked_for(averaged, trained):
    """And so the record's figures of one are the other run's of the other."""
    again = scaleray.evaluate(averaged.run_dir, local=True, record=False)
    other = scaleray.evaluate(averaged.run_dir, weights="trained", local=True, record=False)
    assert again.metrics["val/loss"] == pytest.approx(averaged.metrics["val/loss"], rel=1e-6)
    assert other.metrics["val/loss"] == pytest.approx(trained.metrics["val/loss"], rel=1e-6)
    assert again.metrics["val/loss"] != pytest.approx(other.metrics["val/loss"], rel=1e-6)


@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_an_export_is_of_the_average_unless_the_trained_ones_are_asked_for(averaged, has_checkpoints, tmp_path):
    run = Path(shutil.copytree(averaged.run_dir, tmp_path / "run"))
    if not has_checkpoints:
        shutil.rmtree(run / "checkpoints")
    average, weights = final(averaged)
    for which, wanted in (([], average), (["--weights", "averaged"], average), (["--weights", "trained"], weights)):
        file = tmp_path / f"{which[-1] if which else 'default'}.safetensors"
        assert run_command(["export", str(run), "--out", str(file), *which]) == 0
        found = load_file(file)
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_choice_that_there_is_not_is_refused(averaged, trained, tmp_path, capsys):
    with pytest.raises(UsageError, match=r"--weights is averaged: points has no average"):
        scaleray.load(trained.run_dir, weights="averaged")
    assert same(scaleray.load(trained.run_dir, weights="trained").module, read_weights(trained.run_dir))
    with pytest.raises(UsageError, match=r"--weights is mean: it must be averaged or trained"):
        scaleray.load(averaged.run_dir, weights="mean")
    command = ["export", trained.run_dir, "--out", str(tmp_path / "x.pt"), "--weights", "averaged"]
    assert run_command(command) == 2 and "has no average" in capsys.readouterr().err
