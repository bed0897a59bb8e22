"""Cut a model into pipeline stages without rewriting it, and choose the cuts.

A stage is the user's own model in which the parts of other stages are replaced by placeholders. It runs the user's own
forward code on the model's own inputs. The last placeholder before the stage's blocks ignores its input and returns the
activation from the previous stage; the first placeholder after them ends the pass, with its input as the result. So
code before the blocks may make masks or positions, code after them may pool or scale, and parameters keep their names.
The model must be a chain: each block takes the activation as its first argument and returns the next one."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from scaleray.errors import WorkloadError
from scaleray.parallel.experts import expert_totals, mixtures

Passed = tuple[torch.Tensor, ...]
"""Tensors that a stage sends to the next: its activation, and the totals of its experts if it has any. Empty for the
first stage."""


class StageEnd(BaseException):
    """Signal that ends a forward pass at the end of a stage. Not an Exception, which user code might catch."""

    def __init__(self, activation: torch.Tensor) -> None:
        super().__init__()
        self.activation = activation


@dataclass
class Entry:
    """Holder of a stage's activation until the pass reaches the stage's first block."""

    activation: torch.Tensor | None = None
    num_passes: int = 0
    on_pass: Callable[[], None] = lambda: None


class Before(nn.Module):
    """Placeholder for a part of an earlier stage: returns the activation from the previous stage."""

    is_elsewhere = True

    def __init__(self, entry: Entry, *, is_gate: bool) -> None:
        super().__init__()
        self._entry, self._is_gate = entry, is_gate  # the gate is the last one before the stage's own blocks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_gate:
            self._entry.num_passes += 1
            self._entry.on_pass()
        return self._entry.activation


class After(nn.Module):
    """Placeholder for a part of a later stage: calling it ends the pass."""

    is_elsewhere = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
        if given is None:
            raise WorkloadError.problem(
                "a block of the model", "was called without a tensor: a pipeline sends the first argument of its blocks"
            )
        raise StageEnd(given)


class Elsewhere(nn.Module):
    """Placeholder for a part on another worker, in the model used by optimizer and checkpoints. Never called."""


@dataclass(frozen=True)
class Unit:
    """Part of the model that is not cut: a block, or a module outside the blocks. block: number of the block; for a
    module outside the blocks, that of the block to which it is assigned."""

    path: str
    module: nn.Module
    block: int
    is_block: bool
    is_between: bool
    """Whether it is outside the blocks, with blocks both before and after it."""


@dataclass
class Stage:
    """One stage of a model. `module`: the user's model with placeholders for the parts of other stages."""

    index: int
    num_stages: int
    module: nn.Module
    entry: Entry
    containers: list[nn.Module] = field(default_factory=list)
    """Copies of modules around the blocks, in the same order as in every other view of the model."""
    has_experts: bool = False
    """Whether the model has mixtures of experts, whose totals are passed from stage to stage with the activation."""

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def run(self, call: Callable[[nn.Module], Any], received: Passed) -> Any:
        """Run the stage and return the tensors that the next stage receives or, on the last stage, the result of
        `call`, which runs the model passed to it."""
        self.entry.activation, self.entry.num_passes = (received or (None,))[0], 0
        self.module.__dict__["earlier_totals"] = received[1] if len(received) > 1 else None
        for mixture in mixtures(self.module):
            mixture.balance = None  # that of another pass
        try:
            result = call(self.module)
        except StageEnd as end:
            result = end.activation
            if self.is_last:
                raise AssertionError("the last stage has nothing after it") from None
        else:
            if not self.is_last:
                raise WorkloadError.problem(
                    "the model",
                    f"ended its pass without reaching the block after stage {self.index + 1}: "
                    "a pipeline needs blocks that are called in the order of blocks()",
                )
        finally:
            self.entry.activation = None
        if self.index > 0 and self.entry.num_passes != 1:
            raise called_twice(self.entry.num_passes)
        if self.is_last:
            return result
        return (result, self._totals(result)) if self.has_experts else (result,)

    def _totals(self, activation: torch.Tensor) -> torch.Tensor:
        found = expert_totals(self.module)
        if found is not None:
            return found
        return activation.new_zeros(4, dtype=torch.promote_types(activation.dtype, torch.float32))


def called_twice(times: int) -> WorkloadError:
    """Error for a loss whose number of passes is not one."""
    return WorkloadError.problem(
        "the model",
        f"was called {times} times in one loss(): a pipeline needs one pass for each loss",
        "call it once, on the rows of all calls together; or use --strategy.name fsdp",
    )


def find_units(model: nn.Module, blocks: Sequence[nn.Module]) -> list[Unit]:
    """Parts of the model in the order of registration. Raises WorkloadError if the blocks cannot be separated."""
    numbers = {id(block): number for number, block in enumerate(blocks)}
    if len(numbers) < len(blocks):
        raise WorkloadError.problem("blocks()", "returned the same module twice: a pipeline needs each block once")
    # with duplicates: a module that is registered twice stands in two places
    paths = {path: numbers[id(m)] for path, m in model.named_modules(remove_duplicate=False) if id(m) in numbers}
    if set(paths.values()) != set(range(len(blocks))) or "" in paths:
        text = "returned modules that are not parts of the model: it must return the model's own blocks"
        raise WorkloadError.problem("blocks()", text)
    containers = {p.rpartition(".")[0][:end] for p in paths for end in _prefix_ends(p.rpartition(".")[0])}
    if containers & paths.keys():
        raise WorkloadError.problem("blocks()", "returned a block within a block: blocks must not contain each other")
    if [paths[p] for p in paths] != list(range(len(blocks))):
        text = "returned the blocks in an order that differs from the model's: return each once, in the order of use"
        raise WorkloadError.problem("blocks()", text)
    found: list[Unit] = []

    def collect(module: nn.Module, prefix: str) -> None:
        for name, child in module._modules.items():
            path = f"{prefix}{name}"
            if child is None:
                continue
            if path in containers:
                collect(child, f"{path}.")
                continue
            seen = next((unit.block for unit in reversed(found) if unit.is_block), -1)
            number = paths.get(path, max(0, seen))
            is_between = path not in paths and 0 <= seen < len(blocks) - 1
            found.append(Unit(path, child, number, path in paths, is_between))

    collect(model, "")
    return found


def _prefix_ends(path: str) -> Iterator[int]:
    yield 0
    yield from (end for end, letter in enumerate(path) if letter == ".")
    yield len(path)


def counted_costs(units: Sequence[Unit], num_blocks: int) -> list[float]:
    """Forward operations per token of each block and its surrounding modules: 2 for each parameter in a multiplication.

    A lookup in an embedding multiplies nothing; a head does, even if it shares the embedding's table. Attention's
    products of tokens with tokens are left out, since they are the same in all blocks of a kind. One is added for each
    module, so that parts without parameters are not free. Source: Kaplan et al. 2020, arXiv:2001.08361, section 2.1."""
    costs = [0.0] * num_blocks
    for unit in units:
        for module in unit.module.modules():
            is_lookup = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            own = 0 if is_lookup else sum(p.numel() for p in module.parameters(recurse=False))
            costs[unit.block] += 2.0 * own + 1.0
    return costs


def balanced_bounds(costs: Sequence[float], num_stages: int) -> list[int]:
    """First block of each stage, chosen so that the most expensive stage is as cheap as possible. Each stage has at
    least one block.

    Found by dynamic programming over prefixes, in num_stages x len(costs)^2 steps. Among equal splits, the one whose
    later stages are longer is chosen."""
    num_blocks = len(costs)
    if not 1 <= num_stages <= num_blocks:
        raise ValueError(f"{num_blocks} blocks cannot make {num_stages} stages")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # best[end]: least maximum for the blocks before `end` in the number of stages so far, and where the last one begins
    best = [math.inf if end == 0 else before[end] for end in range(num_blocks + 1)]
    begins: list[list[int]] = [[0] * (num_blocks + 1)]
    for stage in range(1, num_stages):
        following, begin = [math.inf] * (num_blocks + 1), [0] * (num_blocks + 1)
        for end in range(stage + 1, num_blocks + 1):
            for start in range(stage, end):
                worst = max(best[start], before[end] - before[start])
                if worst < following[end]:
                    following[end], begin[end] = worst, start
        best = following
        begins.append(begin)
    bounds, end = [], num_blocks
    for begin in reversed(begins):
        end = begin[end]
        bounds.append(end)
    return bounds[::-1]


def stage_of_block(bounds: Sequence[int], num_blocks: int) -> list[int]:
    """The stage of every block."""
    return [sum(1 for bound in bounds if bound <= block) - 1 for block in range(num_blocks)]


def make_stage(model: nn.Module, units: Sequence[Unit], stages: Sequence[int], index: int) -> Stage:
    """Make stage `index` of a model whose blocks are on `stages`. It shares all modules and tensors with the model."""
    entry = Entry()

    def replacement(unit: Unit) -> nn.Module:
        theirs = stages[unit.block]
        if theirs == index:
            return unit.module
        if not unit.is_block and not unit.is_between and not any(True for _ in unit.module.parameters()):
            return unit.module  # such as a table of positions, which every stage needs; its effect on x is not used
        if theirs > index:
            return After()
        return Before(entry, is_gate=unit.is_block and stages[unit.block + 1] == index)

    module, containers = _view(model, {unit.path: replacement(unit) for unit in units})
    return Stage(index, stages[-1] + 1, module, entry, containers, has_experts=bool(mixtures(model)))


def make_part(
    model: nn.Module, units: Sequence[Unit], is_here: Callable[[Unit], bool]
) -> tuple[nn.Module, list[nn.Module]]:
    """The model with only the units on this worker, and its containers as in `Stage`. A parameter that is used here but
    named after a part on another stage (a tied head) keeps that name, so that it has the same name on all workers."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
    stand_ins = {unit.path: unit.module if is_here(unit) else Elsewhere() for unit in units}
    module, containers = _view(model, stand_ins)
    present = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for parameter in list(module.parameters()):
        name = names[id(parameter)]
        if name in present:
            continue
        path = next(unit.path for unit in units if name.startswith(f"{unit.path}."))
        holder: nn.Module = stand_ins[path]
        *parents, last = name.removeprefix(f"{path}.").split(".")
        for parent in parents:
            if parent not in holder._modules:
                holder.add_module(parent, Elsewhere())
            holder = holder.get_submodule(parent)
        holder.register_parameter(last, parameter)
    return module, containers


def _view(model: nn.Module, units: dict[str, nn.Module]) -> tuple[nn.Module, list[nn.Module]]:
    """Model with replaced units, whose containers are copies that share parameters and buffers."""
    containers: list[nn.Module] = []

    def visit(module: nn.Module, prefix: str) -> nn.Module:
        clone = copy.copy(module)
        clone.__dict__["_modules"] = dict(module._modules)
        containers.append(clone)
        for name, child in module._modules.items():
            path = f"{prefix}{name}"
            if child is not None:
                clone._modules[name] = units[path] if path in units else visit(child, f"{path}.")
        return clone

    return visit(model, ""), containers
