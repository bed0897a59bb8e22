"""Gradients divided by Adam's second moments, small ones end to end: the same norms as one by one in plain torch."""

import pytest
import torch
from torch import nn

from scaleray.training.noise import preconditioning as noise_view
from scaleray.training.noise.preconditioning import OwnNorm, Preconditioned, View, norm

SHAPES = ((3, 4), (40,), (), (5, 2, 2), (30, 3))


def trained_parameters(dtype=torch.float64, *, without_state=()):
    """(parameters with gradients, AdamW after 7 steps in which those of `without_state` took no part)."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    optimizer = torch.optim.AdamW(
        [{"params": parameters[:2]}, {"params": parameters[2:], "eps": 1e-3, "betas": (0.9, 0.95)}], lr=0.01
    )
    for number in range(7):
        for n, parameter in enumerate(parameters):
            takes_part = n not in without_state and not (n == 0 and number < 2)  # the first one is two steps behind
            parameter.grad = torch.randn_like(parameter) if takes_part else None
        optimizer.step()
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters, optimizer


def divided(optimizer, parameter):
    (group,) = [g for g in optimizer.param_groups if any(p is parameter for p in g["params"])]
    state = optimizer.state.get(parameter)
    if not state:
        return parameter.grad
    second = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
    return parameter.grad / (second.sqrt() + group["eps"])


def total(tensors):
    return sum(float(norm(t)) ** 2 for t in tensors) ** 0.5


@pytest.mark.parametrize("small_numel", [0, 25, 10**6])
@pytest.mark.parametrize("without_state", [(), (1,), (0, 1, 2, 3, 4)])
def test_all_ways_of_looking_divide_as_plain_torch_does(monkeypatch, small_numel, without_state):
    monkeypatch.setattr(noise_view, "SMALL_NUMEL", small_numel)
    parameters, optimizer = trained_parameters(without_state=without_state)
    view = Preconditioned(parameters, optimizer)
    own = OwnNorm(view)
    assert len(view.small) == sum(p.numel() <= small_numel for p in parameters)
    for chosen in (parameters, parameters[1:4], parameters):  # what the middle one leaves out must not be counted
        expected = total(divided(optimizer, p) for p in chosen)
        before = [p.grad.clone() for p in parameters]
        view.begin()
        for parameter in chosen:
            own.add(parameter)
        assert total(view.all({p: p.grad for p in chosen})) == pytest.approx(expected, rel=1e-12)
        assert total(own.take()) == pytest.approx(expected, rel=1e-12)
        view.end()
        assert all(torch.equal(p.grad, kept) for p, kept in zip(parameters, before, strict=True))
    assert own.take() == []


def test_a_step_that_begins_anew_counts_nothing_twice():
    parameters, optimizer = trained_parameters()
    view = Preconditioned(parameters, optimizer)
    own = OwnNorm(view)
    view.begin()
    for parameter in parameters:
        own.add(parameter)
    own.forget()
    view.begin()
    own.add(parameters[1])
    assert total(own.take()) == pytest.approx(float(norm(divided(optimizer, parameters[1]))), rel=1e-12)


def test_parameters_of_several_types_are_all_seen():
    parameters, optimizer = trained_parameters(torch.float32)
    other = nn.Parameter(torch.randn(6, dtype=torch.float64))
    other.grad = torch.randn_like(other)
    view = Preconditioned([*parameters, other], optimizer)
    view.begin()
    expected = total([*(divided(optimizer, p) for p in parameters), other.grad])
    # float32
    assert total(view.all({p: p.grad for p in [*parameters, other]})) == pytest.approx(expected, rel=1e-5)


def test_without_preconditioning_gradients_are_not_copied():
    parameters, _ = trained_parameters()
    seen = View().all({p: p.grad for p in parameters})
    assert [t.data_ptr() for t in seen] == [p.grad.data_ptr() for p in parameters]
