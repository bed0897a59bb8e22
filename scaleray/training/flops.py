"""Floating-point operations of a training step, counted by torch while the step runs once."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from scaleray.data import Part
from scaleray.training.job import TRAIN, OpenStream, TrainJob
from scaleray.training.model_setup import prepare
from scaleray.training.place import Place
from scaleray.training.step import TrainStep
from scaleray.training.turn import alone, shortened


def flops_per_sample(job: TrainJob, place: Place, open_stream: OpenStream) -> float | None:
    """Of the model's forward and backward pass: matrix products and convolutions, each multiplication and addition one.

    Counted in one micro-batch on one worker without compilation or activation checkpointing, whose repeated work is
    nothing that the model needs. None where the workload's operations are not known to torch.
    """
