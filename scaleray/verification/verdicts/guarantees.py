"""Guarantees of each strategy relative to the training of one process, and their check.

Replicas that train separately do not equal one process, but their exchanges are linear: means, sums, mixtures.
Signatures are linear too: a mean of tensors has the mean of their signatures, so every exchange can be recomputed from
the replicas before it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scaleray.config import RunConfig
from scaleray.records.certificate import Divergence
from scaleray.strategies.apart.graphs import mixing_matrix
from scaleray.strategies.diloco import fragments
from scaleray.verification.traces.run_trace import StepTrace, Trace

Groups = list[list[int]]
"""Groups of ranks whose values are averaged."""
Machines = Sequence[tuple[str, str]]
"""Machine of each rank."""
Law = Callable[[Trace, RunConfig], Iterator[tuple[int, np.ndarray]]]
"""Function that yields (step, signatures (ranks, parameters, 3) that replicas should have after it)."""


@dataclass(frozen=True)
class Guarantee:
    """Guarantee of a strategy relative to the training of one process."""

    is_exact: bool = True
    keeps: frozenset[str] = frozenset()
    """Quantities of a Divergence that must be equal even for a strategy that is not exact."""
    words: str = "equal to one process"
    exact_steps: Callable[[RunConfig], int] | None = None
    """Number of first steps that are equal in every respect; the next step's loss is equal too, since it starts from
    the same parameters."""
    agrees_after: Callable[[RunConfig, int], bool] = lambda config, step: False
    """Whether all ranks hold the same parameters after this step."""
    shares_state_after: Callable[[RunConfig, int], bool] = lambda config, step: False
    """Whether all ranks hold the same state of the optimizer after this step."""
    law: Law | None = None
    """Parameters that replicas should hold after each step, given those before it."""
    groups: Callable[[RunConfig, int, Machines], Groups] = lambda config, step, machines: _each_alone(machines)
    """Groups of ranks that average the optimizer's state after a step; by default each rank keeps its own."""
    is_under_way: Callable[[RunConfig, int], bool] = lambda config, step: False
    """Whether messages or updates that belong to the replicas' mean may be in flight after a step."""
    buffers: Callable[[RunConfig, int, np.ndarray, Machines], np.ndarray | None] = lambda *arguments: None
    """Signatures (ranks, 4) of a buffer at the end of a step, given those before ranks communicate; ignore their norms.
    None without a guarantee."""
    mean: Callable[[Trace, RunConfig, int], np.ndarray | None] = lambda trace, config, step: None
    """Signatures (parameters, 3) of the replicas' mean after a step; None if it cannot be computed."""

    def is_kept_by(self, divergence: Divergence, config: RunConfig, resumed_after: int | None = None) -> bool:
        """Whether the quantity must equal one process in this step. resumed_after: step after which a resume made
        replicas equal."""
        if divergence.quantity == "evaluation":
            return True  # compared with the mean of the replicas
        first = self.exact_steps(config) if self.exact_steps is not None else -1
        must_be_equal = divergence.quantity in self.keeps or divergence.step <= first
        starts_equal = divergence.step == first + 1 or (
            resumed_after is not None and divergence.step == resumed_after + 1
        )
        return not (must_be_equal or (starts_equal and divergence.quantity == "loss"))

    def disagreement(self, trace: Trace, config: RunConfig, bound: float) -> Divergence | None:
        """First step after which ranks differ although they should agree, or violate the law of their exchange."""
        due = dict(self.law(trace, config)) if self.law is not None and config.pruning.method == "none" else {}
        for number, step in enumerate(trace.steps):
            looks = (
                _moved_between(trace, number, config, bound),
                self._apart(step, trace, config, bound),
                self._buffers_unlawful(step, config, bound),
                self._unlawful(step, trace, due, bound),
                self._state_unlawful(step, config, bound),
                _mass_lost(step, trace, bound),
            )
            for found in looks:
                if found is not None:
                    return found
        return None

    def _apart(self, step: StepTrace, trace: Trace, config: RunConfig, bound: float) -> Divergence | None:
        spread = float(step.parameter_spread.max(initial=0.0))
        if self.agrees_after(config, step.step) and not spread <= bound:
            name = trace.names[int(np.nanargmax(step.parameter_spread))]
            return Divergence(step.step, "averaging" if step.replicas is not None else "parameters", spread, name)
        if step.replicas is None or not self.shares_state_after(config, step.step):
            return None
        is_shared = step.replicas.state_spread <= bound
        return None if is_shared else Divergence(step.step, "averaging", step.replicas.state_spread, None)

    def _buffers_unlawful(self, step: StepTrace, config: RunConfig, bound: float) -> Divergence | None:
        for name, updated in step.replicas.buffers_updated.items() if step.replicas is not None else ():
            assert step.replicas is not None
            due = self.buffers(config, step.step, updated, step.replicas.machines)
            if due is None or name not in step.replicas.buffers_after:
                continue
            if not (apart := _farthest(step.replicas.buffers_after[name], due)) <= bound:
                return Divergence(step.step, "buffers", apart, name)
        return None

    def _state_unlawful(self, step: StepTrace, config: RunConfig, bound: float) -> Divergence | None:
        """First tensor of the optimizer's state that is not the mean over its group at the end of a step."""
        if step.replicas is None:
            return None
        groups = self.groups(config, step.step, step.replicas.machines)
        for name, before in step.replicas.state_updated.items():
            if name not in step.replicas.state_after:
                continue
            if not (apart := _farthest(step.replicas.state_after[name], _within(groups, before))) <= bound:
                return Divergence(step.step, "averaging", apart, name)
        return None

    def _unlawful(self, step: StepTrace, trace: Trace, due: dict[int, np.ndarray], bound: float) -> Divergence | None:
        if step.step not in due or step.replicas is None:
            return None
        found = step.replicas.after
        apart = np.abs(found[:, :, 1:] - due[step.step]).max(axis=(0, 2))
        norms = found[:, :, 0].max(axis=0)
        relative = apart / np.maximum(norms, 1e-3 * float(np.linalg.norm(norms)))
        if not relative.max(initial=0.0) <= bound:
            first = int(np.flatnonzero(~(relative <= bound))[0])
            return Divergence(step.step, "averaging", float(relative[first]), trace.names[first])
        return None


def _farthest(found: np.ndarray, due: np.ndarray) -> float:
    """Largest relative difference between signatures (ranks, 4), ignoring their norms."""
    scale = float(np.abs(due[:, 0]).max()) or 1.0
    return float(np.abs(found[:, 1:] - due[:, 1:]).max()) / scale


def _moved_between(trace: Trace, number: int, config: RunConfig, bound: float) -> Divergence | None:
    """First value of the replicas that changed between the end of one step and the beginning of the next."""
    step = trace.steps[number]
    is_resumed = trace.restored is not None and step.step == trace.restored.step + 1
    last = None if number == 0 or is_resumed else trace.steps[number - 1].replicas
    if step.replicas is None or last is None or config.pruning.method != "none":
        return None
    found = {n: (step.replicas.state_before.get(n), due) for n, due in last.state_after.items()}
    found |= {n: (step.replicas.before[:, i], last.after[:, i]) for i, n in enumerate(trace.names)}
    for name, (now, due) in found.items():
        if now is not None and not (apart := _farthest(now, due)) <= bound:
            return Divergence(step.step, "replicas before", apart, name)
    return None


def _averages_after(config: RunConfig, step: int) -> bool:
    since = step - config.local_sgd.warmup_steps
    return since <= 0 or since % config.local_sgd.sync_every == 0


def _agrees_after(config: RunConfig, step: int) -> bool:
    """Whether all replicas have the same parameters after a step of DiLoCo."""
    return step <= config.local_sgd.warmup_steps or (not config.local_sgd.streams and _averages_after(config, step))


def _averages_within_nodes_after(config: RunConfig, step: int) -> bool:
    since, every = step - config.local_sgd.warmup_steps, config.local_sgd.node_sync_every
    return every is not None and since > 0 and since % every == 0


def _local_steps(trace: Trace, config: RunConfig) -> Iterator[tuple[StepTrace, Machines, np.ndarray]]:
    """Replicas' own updates: step, the ranks' machines, and signatures (ranks, parameters, 3) after the optimizer's
    update."""
    for step in trace.steps:
        if step.step > config.local_sgd.warmup_steps and step.replicas is not None:
            yield step, step.replicas.machines, step.replicas.updated[:, :, 1:]


def _each_alone(machines: Machines) -> Groups:
    return [[rank] for rank in range(len(machines))]


def _averaged(config: RunConfig, step: int, machines: Machines) -> Groups:
    """Groups of replicas averaged after a step of local SGD, or of DiLoCo within nodes; single ranks if none are."""
    settings, ranks = config.local_sgd, range(len(machines))
    if step <= settings.warmup_steps:
        return _each_alone(machines)  # equal already
    if _averages_after(config, step):
        return [list(ranks)]
    if not _averages_within_nodes_after(config, step):
        return _each_alone(machines)
    nodes: Sequence[Any] = [rank // settings.node_size for rank in ranks] if settings.node_size else machines
    return [[rank for rank in ranks if nodes[rank] == node] for node in dict.fromkeys(nodes)]


def _averaged_state(config: RunConfig, step: int, machines: Machines) -> Groups:
    return _averaged(config, step, machines) if config.local_sgd.average_momentum else _each_alone(machines)


def _averaged_buffers(config: RunConfig, step: int, updated: np.ndarray, machines: Machines) -> np.ndarray | None:
    if step <= config.local_sgd.warmup_steps:
        return None
    degrees, ranks = config.degrees(), np.arange(len(updated))
    firsts = ranks - ranks // degrees.tensor % degrees.shard * degrees.tensor  # whose buffers those next to them take
    return _within(_averaged(config, step, machines), updated[firsts])


def _mixed_buffers(config: RunConfig, step: int, updated: np.ndarray, machines: Machines) -> np.ndarray | None:
    if config.gossip.is_asynchronous:
        return None
    mixed: np.ndarray = mixing_matrix(config.gossip.graph, len(updated), step, seed=config.seed) @ updated
    return mixed


def _within(groups: Groups, updated: np.ndarray) -> np.ndarray:
    """Values of the ranks (ranks, ...) after averaging within each group."""
    due = updated.copy()
    for group in groups:
        due[group] = updated[group].mean(axis=0)
    return due


def _local_sgd(trace: Trace, config: RunConfig) -> Iterator[tuple[int, np.ndarray]]:
    for step, machines, updated in _local_steps(trace, config):
        yield step.step, _within(_averaged(config, step.step, machines), updated)


def _diloco(trace: Trace, config: RunConfig) -> Iterator[tuple[int, np.ndarray]]:
    settings = config.local_sgd
    anchor = momentum = np.zeros(0)
    cut = fragments(trace.names, settings)
    fragment_of = np.array([cut[name] for name in trace.names])
    under_way: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # parameters and their mean, by the step that began it
    begins = {max(1, settings.warmup_steps + 1), (trace.restored.step if trace.restored else 0) + 1}
    for step, machines, updated in _local_steps(trace, config):
        if step.step in begins:  # a resume on other workers begins at the mean
            assert step.replicas is not None
            anchor = step.replicas.before[:, :, 1:].mean(axis=0)
            momentum = np.zeros_like(anchor)
            under_way.clear()
        since = step.step - settings.warmup_steps
        if since % settings.fragment_every == 0:
            own = fragment_of == (since // settings.fragment_every - 1) % settings.fragments
            under_way[since] = own, updated[:, own].mean(axis=0)
        groups = _each_alone(machines) if _averages_after(config, step.step) else None
        due = _within(groups or _averaged(config, step.step, machines), updated)
        if since - settings.overlap in under_way:
            own, mean = under_way.pop(since - settings.overlap)
            moved = anchor[own] - mean
            momentum[own] = settings.outer_momentum * momentum[own] + moved
            anchor[own] -= settings.outer_learning_rate * (moved + settings.outer_momentum * momentum[own])
            due[:, own] = settings.mixing * updated[:, own] + (1 - settings.mixing) * anchor[own]
        yield step.step, due


def _gossip(trace: Trace, config: RunConfig) -> Iterator[tuple[int, np.ndarray]]:
    if config.gossip.is_asynchronous:
        return  # what is promised of it is the sum over replicas and messages, see `_mass_lost`
    for step in trace.steps:
        if step.replicas is not None:
            updated = step.replicas.updated[:, :, 1:]
            matrix = mixing_matrix(config.gossip.graph, len(updated), step.step, seed=config.seed)
            yield step.step, np.einsum("rs,spq->rpq", matrix, updated)


def _mean_of_replicas(trace: Trace, config: RunConfig, step: int) -> np.ndarray | None:
    replicas = trace.step(step).replicas
    return replicas.after[:, :, 1:].mean(axis=0) if replicas is not None else None


def _mean_in_gossip(trace: Trace, config: RunConfig, step: int) -> np.ndarray | None:
    if not config.gossip.is_asynchronous:
        return _mean_of_replicas(trace, config, step)
    replicas = trace.step(step).replicas  # messages under way belong to the mean
    return None if replicas is None or replicas.masses is None else replicas.masses[:, :, 1:].mean(axis=0)


def _mass_lost(step: StepTrace, trace: Trace, bound: float) -> Divergence | None:
    """A parameter whose weighted sum over replicas and messages in flight is not the previous step's sum plus the
    replicas' updates. Asynchronous gossip guarantees this equality for any order of messages (Assran et al. 2018,
    arXiv:1811.10792, section 3)."""
    replicas = step.replicas
    if replicas is None or replicas.masses is None or replicas.weights is None:
        return None
    resumed = trace.restored is not None and step.step == trace.restored.step + 1
    last = None if step.step == 1 or resumed else trace.step(step.step - 1).replicas
    if last is None or last.masses is None or last.weights is None:
        weights, due = np.ones(len(replicas.weights)), replicas.before[:, :, 1:].mean(axis=0)
    else:
        weights, due = last.weights, last.masses[:, :, 1:].mean(axis=0)
    moved = (replicas.updated - replicas.before)[:, :, 1:]
    due = due + (weights[:, None, None] * moved).mean(axis=0)
    apart = np.abs(replicas.masses[:, :, 1:].mean(axis=0) - due).max(axis=1)
    norms = replicas.after[:, :, 0].max(axis=0)
    relative = apart / np.maximum(norms, 1e-3 * float(np.linalg.norm(norms)))
    first = int(np.argmax(relative))
    if not relative[first] <= bound:
        return Divergence(step.step, "averaging", float(relative[first]), trace.names[first])
    return None


def _async_sgd(trace: Trace, config: RunConfig) -> Iterator[tuple[int, np.ndarray]]:
    """Law of async_sgd: each worker has its own part of every update at once. Of the others, it has the sums of all
    steps up to one at most `max_staleness` ago, the same for all parameters; after a synchronisation, it has all sums.
    """
    base, own, others, met = np.zeros(0), np.zeros(0), [np.zeros(0)], 0
    for step in trace.steps:
        if step.replicas is None:
            return
        before, updated = step.replicas.before[:, :, 1:], step.replicas.updated[:, :, 1:]
        if step.step == 1 or (trace.restored is not None and step.step == trace.restored.step + 1):
            base, own, others, met = before, np.zeros_like(before), [np.zeros_like(before)], 0
        part = (updated - before) / len(before)
        own = own + part
        others.append(others[-1] + part.sum(axis=0) - part)
        if step.step % config.gossip.meet_every == 0:
            met = len(others) - 1
        first = max(len(others) - 1 - config.gossip.max_staleness, met)
        found, due = step.replicas.after[:, :, 1:], np.empty_like(before)
        for rank, values in enumerate(found):
            allowed = [base[rank] + own[rank] + arrived[rank] for arrived in others[first:]]
            if config.deterministic:
                allowed = allowed[:1]
            due[rank] = min(allowed, key=lambda one: float(np.abs(one - values).max()))
        yield step.step, due


def _sum_of_updates(trace: Trace, config: RunConfig, step: int) -> np.ndarray | None:
    """Sum of all updates: each of n workers' updates counts 1/n in every step, wherever it currently is."""
    first, total = 1, trace.initial[:, 1:].copy()
    if trace.restored is not None and step > trace.restored.step:
        first, total = trace.restored.step + 1, trace.restored.parameters[:, 1:].copy()
    for number in range(first, step + 1):
        replicas = trace.step(number).replicas
        if replicas is None:
            return None
        total += (replicas.updated - replicas.before)[:, :, 1:].mean(axis=0)
    return total


_SAME_COURSE = frozenset(
    {
        "model",
        "dtype",
        "initial parameters",
        "rows",
        "inputs",
        "layers",
        "count",
        "learning rate",
        "steps",
        "restored parameters",
    }
)
GUARANTEES = {
    "local_sgd": Guarantee(
        False, _SAME_COURSE,
        "replicas train apart between averagings: same start, rows and learning rates, and the mean of all",
        lambda config: config.local_sgd.warmup_steps, _averages_after,
        lambda config, step: config.local_sgd.average_momentum and _averages_after(config, step),
        _local_sgd, _averaged_state, buffers=_averaged_buffers, mean=_mean_of_replicas,
    ),
    "diloco": Guarantee(
        False, _SAME_COURSE,
        "replicas train apart between outer steps: same start, rows and learning rates, "
        "and the outer optimizer's steps",
        lambda config: config.local_sgd.warmup_steps, _agrees_after, law=_diloco,
        buffers=_averaged_buffers, mean=_mean_of_replicas,
    ),
    "gossip": Guarantee(
        False, _SAME_COURSE,
        "replicas agree only in the limit: same start, rows and learning rates, and mixtures along the graph",
        lambda config: 0, law=_gossip, is_under_way=lambda config, step: config.gossip.is_asynchronous,
        buffers=_mixed_buffers, mean=_mean_in_gossip,
    ),
    "async_sgd": Guarantee(
        False, _SAME_COURSE,
        "updates are late by a bounded number of steps: same start, rows and learning rates, and each update just once",
        lambda config: 0, lambda config, step: step % config.gossip.meet_every == 0, law=_async_sgd,
        is_under_way=lambda config, step: step % config.gossip.meet_every != 0, mean=_sum_of_updates,
    ),
    "compression": Guarantee(
        False, _SAME_COURSE,
        "gradients are approximated: same start, rows and learning rates; what was not sent is kept, "
        "and all ranks agree",
        exact_steps=lambda config: config.compression.start_step, agrees_after=lambda config, step: True,
    ),
}  # fmt: skip
"""Strategies that do not guarantee equality to one process; all others do."""


def guarantee_of(strategy: str, config: RunConfig, world_size: int) -> Guarantee:
    """Guarantee of a strategy under this config."""
    if strategy not in GUARANTEES and config.compression.name != "none" and world_size > 1:
        return GUARANTEES["compression"]
    return GUARANTEES.get(strategy, Guarantee())
