"""Gossip: mixing matrices, what a step of mixing does, who waits for whom, and what is saved."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import Classify, Stepper, largest_difference, make_job, train
from torch import nn

from scaleray.common.metric_names import CONSENSUS_DISTANCE
from scaleray.config import load_config
from scaleray.errors import NonFiniteLossError
from scaleray.strategies.apart.graphs import mixing_matrix
from scaleray.strategies.apart.replicas import Replicas
from scaleray.strategies.contract.parallel import known
from scaleray.strategies.gossip import Mixing

pytestmark = pytest.mark.combination  # a feature that few commits touch: its tests take turns

GRAPHS = ["ring", "exponential", "matching"]
GOSSIP = {"strategy.name": "gossip", "gossip.meet_every": 5, "batch.drop_last": True}
ASYNCHRONOUS = {**GOSSIP, "gossip.is_asynchronous": True, "gossip.max_staleness": 2}


# laws of the matrices


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("size", range(1, 10))
def test_mixing_matrices_are_doubly_stochastic(graph, size):
    for step in range(1, 8):
        matrix = mixing_matrix(graph, size, step, seed=3)
        assert (matrix >= 0).all() and matrix.diagonal().min() > 0
        np.testing.assert_allclose(matrix.sum(axis=0), 1.0, rtol=1e-15)
        np.testing.assert_allclose(matrix.sum(axis=1), 1.0, rtol=1e-15)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_one_round_of_the_exponential_graph_is_the_exact_mean(size):
    product = np.eye(size)
    for step in range(5, 5 + size.bit_length() - 1):  # from anywhere
        product = mixing_matrix("exponential", size, step) @ product
    np.testing.assert_allclose(product, 1.0 / size, atol=1e-15)


@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_the_ring_has_the_second_eigenvalue_of_the_formula(size):
    eigenvalues = np.sort(np.abs(np.linalg.eigvalsh(mixing_matrix("ring", size, 1))))
    assert eigenvalues[-1] == pytest.approx(1.0)
    expected = max(abs(1 / 3 + 2 / 3 * np.cos(2 * np.pi * k / size)) for k in range(1, size))
    assert eigenvalues[-2] == pytest.approx(expected, abs=1e-12)


def test_matchings_are_pairs_that_are_new_each_step_and_the_same_for_a_seed():
    matrices = [mixing_matrix("matching", 6, step, seed=1) for step in range(1, 9)]
    assert all(((m == 0.5).sum(axis=1) == 2).all() for m in matrices)
    assert len({m.tobytes() for m in matrices}) > 4
    again = [mixing_matrix("matching", 6, step, seed=1) for step in range(1, 9)]
    assert all(np.array_equal(a, b) for a, b in zip(matrices, again, strict=True))
    other = [mixing_matrix("matching", 6, step, seed=2) for step in range(1, 9)]
    assert any(not np.array_equal(a, b) for a, b in zip(matrices, other, strict=True))
    assert (mixing_matrix("matching", 5, 1) == 1).sum() == 1  # of an odd number one stays alone


# a step of mixing


def mixed(place, flags, num_steps, values, pauses_s=None):
    """Each rank's value after each step of mixing alone; its weight and settled mean at the end."""
    config = load_config(
        flags={
            "workload.name": "small_runs:Classify",
            "batch.global_size": 8,
            "optimizer.learning_rate": 0.1,
            "stop.after": "1 epochs",
            **flags,
        },
        environ={},
    )
    model = nn.Linear(1, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor(values[place.rank], dtype=torch.float64).reshape(2, 1))
    replicas = Replicas(model, torch.distributed.group.WORLD, bucket_mib=1.0)
    mixing = Mixing(replicas, config)
    found = []
    for step in range(1, num_steps + 1):
        if pauses_s is not None:
            time.sleep(pauses_s[place.rank][step - 1])
        mixing.step(step)
        found.append(model.weight.detach().flatten().tolist())
    with replicas.averaged(False):
        mean = model.weight.detach().flatten().tolist()
    under_way = sum(float(r[-1]) for letter in mixing.inbox.wait_all() for r in letter.received)
    weight = mixing.weight + under_way
    mixing.wait()
    return found, weight, mean


def spread_values(size):
    return np.random.default_rng(8).normal(size=(size, 2)).tolist()


@pytest.mark.each_value
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("graph", GRAPHS)
def test_a_step_multiplies_with_the_matrix_and_keeps_the_mean(gloo, graph, size):
    values = spread_values(size)
    everyone = gloo.run(size, mixed, {"gossip.graph": graph, "seed": 5}, 5, values)
    expected = np.array(values)
    for step in range(1, 6):
        expected = mixing_matrix(graph, size, step, seed=5) @ expected
        found = np.array([everyone[rank][0][step - 1] for rank in range(size)])
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-15)
        np.testing.assert_allclose(found.mean(axis=0), np.mean(values, axis=0), rtol=1e-13, atol=1e-15)
    assert [weight for _, weight, _ in everyone] == pytest.approx([1.0] * size, abs=1e-15)


def test_the_distance_on_a_ring_shrinks_by_the_second_eigenvalue(gloo):
    matrix = mixing_matrix("ring", 4, 1)
    eigenvalues, vectors = np.linalg.eigh(matrix)
    second = np.argsort(np.abs(eigenvalues))[-2]
    values = np.stack([vectors[:, second], 2 * vectors[:, second]], axis=1)
    everyone = gloo.run(4, mixed, {"gossip.graph": "ring"}, 6, values.tolist())
    distances = [np.linalg.norm([everyone[rank][0][step] for rank in range(4)]) for step in range(6)]
    ratios = np.array(distances[1:]) / np.array(distances[:-1])
    np.testing.assert_allclose(ratios, abs(eigenvalues[second]), rtol=1e-9)


@pytest.mark.each_value
@pytest.mark.parametrize("is_deterministic", [True, False])
@pytest.mark.parametrize("graph", GRAPHS)
def test_late_messages_lose_nothing_of_the_mean_and_never_overshoot(gloo, graph, is_deterministic):
    values = spread_values(4)
    flags = {
        "gossip.graph": graph,
        "gossip.is_asynchronous": True,
        "gossip.max_staleness": 3,
        "deterministic": is_deterministic,
    }
    pauses_s = np.random.default_rng(1).choice([0.0, 0.0, 0.01], size=(4, 100)).tolist()
    everyone = gloo.run(4, mixed, flags, 100, values, pauses_s)
    true = np.mean(values, axis=0)
    assert sum(weight for _, weight, _ in everyone) == pytest.approx(4.0, rel=1e-12)
    for _, _, mean in everyone:
        np.testing.assert_allclose(mean, true, rtol=1e-12)
    found = np.array([steps for steps, _, _ in everyone])  # (ranks, steps, values)
    assert (found <= np.max(values, axis=0) + 1e-12).all() and (found >= np.min(values, axis=0) - 1e-12).all()
    first, last = (np.linalg.norm(found[:, step] - true) for step in (0, -1))
    assert last < 0.05 * first


def test_an_asynchronous_run_is_repeatable_if_asked(gloo):
    values = spread_values(3)
    flags = {"gossip.is_asynchronous": True, "gossip.max_staleness": 2, "deterministic": True}
    pauses_s = np.random.default_rng(1).choice([0.0, 0.01], size=(3, 10)).tolist()
    first = gloo.run(3, mixed, flags, 10, values, pauses_s)
    second = gloo.run(3, mixed, flags, 10, values, pauses_s[::-1])
    assert first == second


# who waits for whom


class SlowOnRank1(Classify):
    """Rank 1 stays in its third step until rank 0 has taken `lead` more than rank 1; then it looks if rank 0 goes on."""

    def __init__(self, folder, lead):
        super().__init__(num_rows=200)
        self.folder, self.lead, self.calls = Path(folder), lead, 0

    def loss(self, model, batch):
        if model.training and torch.is_grad_enabled():
            self.calls += 1
            rank = torch.distributed.get_rank()
            (self.folder / f"{rank}.{self.calls}").touch()
            if rank == 1 and self.calls == 3:
                # rank 0 begins step n + 1 when its step n is complete; rank 1 has completed 2
                self._wait_for(2 + self.lead + 1)
                time.sleep(0.5)
                self.went_on = (self.folder / f"0.{2 + self.lead + 2}").exists()
                (self.folder / ("too far" if self.went_on else "bounded")).touch()
        return super().loss(model, batch)

    def _wait_for(self, step):
        deadline = time.monotonic() + 600
        while not (self.folder / f"0.{step}").exists():
            assert time.monotonic() < deadline, f"rank 0 waits for rank 1 before step {step}"
            time.sleep(0.01)


@pytest.mark.each_value
@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize("strategy", ["gossip", "async_sgd"])
@pytest.mark.parametrize("is_deterministic", [True, False])
def test_a_slow_worker_does_not_hold_the_others_up_to_the_bound(gloo, tmp_path, strategy, staleness, is_deterministic):
    flags = {
        **ASYNCHRONOUS,
        "strategy.name": strategy,
        "gossip.max_staleness": staleness,
        "gossip.meet_every": 20,
        "stop.after": "20 steps",
        "deterministic": is_deterministic,
    }
    first = gloo.run(2, train, SlowOnRank1(tmp_path, lead=staleness), flags)[0]
    assert len(first.steps) == 20
    assert (tmp_path / "bounded").exists() and not (tmp_path / "too far").exists()


def test_without_asynchrony_nobody_is_ahead(gloo, tmp_path):
    first = gloo.run(
        2, train, SlowOnRank1(tmp_path, lead=0), {**GOSSIP, "gossip.meet_every": 20, "stop.after": "6 steps"}
    )[0]
    assert len(first.steps) == 6
    assert (tmp_path / "bounded").exists() and not (tmp_path / "too far").exists()


# in training


def distances(place, flags, num_steps):
    stepper = Stepper(place, Classify(), flags)
    found = []
    for number in range(1, num_steps + 1):
        stepper(number)
        found.append((stepper.weights, known(stepper.parallel.metrics()).get(CONSENSUS_DISTANCE.name)))
    sent = stepper.parallel.bytes_sent()
    stepper.parallel.close()
    return found, sent


def test_the_consensus_distance_is_reported_from_the_first_meeting_on(gloo):
    everyone = gloo.run(4, distances, {**GOSSIP, "gossip.graph": "ring"}, 6)
    first = everyone[0][0]
    assert [distance is None for _, distance in first] == [True] * 4 + [False] * 2
    flat = torch.stack([torch.cat([v.flatten() for v in found[4][0].values()]) for found, _ in everyone])
    mean = flat.mean(dim=0)
    expected = ((flat - mean).square().sum(dim=1).mean().sqrt() / mean.norm()).item()
    assert first[4][1] == pytest.approx(expected, rel=1e-9) and expected > 0


def test_bytes_are_those_of_the_neighbours(gloo):
    num_values = sum(p.numel() for p in Classify().build_model().parameters())
    letter, measuring = 8 * (num_values + 1), 8 * num_values
    flags = {**GOSSIP, "gossip.meet_every": 6}
    assert gloo.run(4, distances, {**flags, "gossip.graph": "ring"}, 6)[0][1] == 6 * 2 * letter + measuring
    assert gloo.run(4, distances, {**flags, "gossip.graph": "exponential"}, 6)[0][1] == 6 * letter + measuring


class BadOnRank1(Classify):
    """The loss of one step is NaN on one worker."""

    calls = 0

    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        if torch.is_grad_enabled() and model.training:
            self.calls += 1
            if torch.distributed.get_rank() == 1 and self.calls == 3:
                total = total * float("nan")
        return total, count


def train_or_error(place, workload, flags):
    try:
        return train(place, workload, flags)
    except NonFiniteLossError as exc:
        return str(exc)


@pytest.mark.parametrize("strategy", ["gossip", "async_sgd"])
def test_one_workers_bad_loss_is_raised_on_all_or_skipped_by_it_alone(gloo, strategy):
    flags = {**ASYNCHRONOUS, "strategy.name": strategy, "stop.after": "10 steps"}
    texts = gloo.run(2, train_or_error, BadOnRank1(num_rows=32), flags)
    assert all("up to step 5" in text for text in texts)
    first, _ = gloo.run(2, train_or_error, BadOnRank1(num_rows=32), {**flags, "on_nonfinite": "skip"})
    assert len(first.steps) == 10 and first.summary.nonfinite_steps == 1
    assert all(value.isfinite().all() for value in first.weights.values())


def test_one_worker_trains_alone_under_any_of_these_names():
    for name in ("local_sgd", "diloco", "gossip", "async_sgd"):
        job, _ = make_job(Classify(), {"strategy.name": name})
        assert job.recipe.strategy == "single"


def test_a_gossip_run_ends_with_the_mean_of_its_replicas(gloo):
    flags = {**GOSSIP, "stop.after": "7 steps", "gossip.graph": "ring"}
    finished = gloo.run(4, train, Classify(num_rows=64), flags)[0]
    everyone = gloo.run(4, weights_after, Classify(num_rows=64), flags, 7)
    mean = {n: torch.stack([w[n] for w in everyone]).mean(dim=0) for n in everyone[0]}
    assert largest_difference(mean, finished.weights) < 1e-12
    assert largest_difference(everyone[0], everyone[1]) > 1e-6


def weights_after(place, workload, flags, num_steps):
    stepper = Stepper(place, workload, flags)
    for number in range(1, num_steps + 1):
        stepper(number)
    weights = stepper.weights
    stepper.parallel.close()
    return weights


def test_a_staleness_that_nobody_asked_for_is_reported(gloo):
    flags = {**GOSSIP, "gossip.max_staleness": 2, "stop.after": "2 steps"}
    events = gloo.run(2, train, Classify(), flags)[0].events
    assert "gossip.max_staleness has no effect without gossip.is_asynchronous" in events
