"""Find the repeated blocks of a model from its structure, for sharding and activation checkpointing, if its workload
does not list them.

A container counts if most of its members with submodules are of one class, as with transformer layers and the residual
blocks of an image network. Used by the ready-made workloads of `hugging_face` and `images`.
"""

from collections import Counter

from torch import nn


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Outermost repeated blocks, in the model's order; empty if there are none.

    Strategies handle blocks whose parameters are also used elsewhere (tied ones) themselves.
    """
    found: list[nn.Module] = []
    _collect(model, found, set())
    return found


def _collect(module: nn.Module, found: list[nn.Module], seen: set[int]) -> None:
    blocks = _repeated(module)
    for child in module.children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        if child in blocks:
            found.append(child)
        else:
            _collect(child, found, seen)


def _repeated(module: nn.Module) -> list[nn.Module]:
    """Members of a container that are repeated blocks."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return []
    members = [m for m in module.children() if _has_parts(m)]
    if not members:
        return []
    name, most = Counter(type(m) for m in members).most_common(1)[0]
    least = 1 if isinstance(module, nn.ModuleList) else 2  # a model with one layer has a list of one
    return [m for m in members if type(m) is name] if most >= least and 2 * most > len(members) else []


def _has_parts(module: nn.Module) -> bool:
    """Whether this is a block: a module with a forward pass, parameters, and several submodules with parameters."""
    if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        return False
    return sum(1 for part in module.modules() if any(True for _ in part.parameters(recurse=False))) > 1
