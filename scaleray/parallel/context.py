"""Context parallelism: the workers of a group have the same rows, and each computes a part of every sequence.

Tokens of different workers interact only in attention. While a training runs, `scaled_dot_product_attention` of
torch.nn.functional, which models and torch's own layers call, exchanges them in one of two ways. By heads, an
all-to-all gives each worker all tokens of some heads (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv:2309.14509). In a
ring, keys and values pass from worker to worker while each computes with those it has, and partial results are merged
by their log-sum-exp (Liu et al. 2023, arXiv:2310.01889)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from scaleray.errors import WorkloadError
from scaleray.parallel.ring_attention import Run, ring_attention

_attention = F.scaled_dot_product_attention


@dataclass
class Context:
    """Workers that share each sequence. exchange: `heads` or `ring`. group: None in a rehearsal on one worker, where
    the tokens of the first worker attend only to each other."""

    exchange: str
    size: int
    rank: int = 0
    group: dist.ProcessGroup | None = None
    run: Run = lambda start, payload: start()
    """Function that starts an exchange of this payload and counts it."""
    heads_on: int = 1
    """Number of workers that would divide the heads of a layer; for a rehearsal, which has all of them."""
    has_values: bool = True
    """False in a rehearsal with tensors that have only shapes, where a model may pass a mask that it otherwise
    omits."""
    has_cut: bool = False
    num_exchanges: int = 0

    @classmethod
    def over(cls, group: dist.ProcessGroup, exchange: str) -> Context:
        """Make the context of a group's workers."""
        return cls(exchange, dist.get_world_size(group), dist.get_rank(group), group)

    def pieces(self) -> list[int]:
        """This worker's pieces of a sequence. By heads, sequences are cut into one piece per worker. In a ring, they
        are cut into two per worker, an early and a late one, so that causal attention is equal work for all."""
        return [self.rank] if self.exchange == "heads" else [self.rank, 2 * self.size - 1 - self.rank]


_active: Context | None = None


def part(tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """This worker's tokens of a tensor that has whole sequences along `dim`; all of them without `parallel.context`.
    Raises WorkloadError for a length that the number of workers does not divide."""
    if _active is None:
        return tensor
    pieces = _active.pieces()
    multiple, length = len(pieces) * _active.size, tensor.shape[dim]
    if length % multiple:
        raise WorkloadError.problem(
            "a sequence",
            f"has {length} tokens: parallel.context {_active.size} cuts it into {multiple} equal pieces",
            f"pad it to a multiple of {multiple}, such as {-(-length // multiple) * multiple}",
        )
    _active.has_cut = True
    cut = tensor.tensor_split(multiple, dim)
    return torch.cat([cut[number] for number in pieces], dim)


def positions(length: int, device: torch.device | None = None) -> torch.Tensor:
    """Positions (length,) in the whole sequence of the `length` tokens that `part` gives a worker."""
    if _active is None:
        return torch.arange(length, device=device)
    return part(torch.arange(length * _active.size, device=device), dim=0)


def size() -> int:
    """Number of workers that share each sequence."""
    return _active.size if _active is not None else 1


def rank() -> int:
    """Number of this worker among those that share its sequences."""
    return _active.rank if _active is not None else 0


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor over the workers that share each sequence, with gradients. Collective over them."""
    if _active is None or _active.group is None:
        return tensor
    found: torch.Tensor = _Sum.apply(tensor, _active.group)
    return found


def counted_before(counts: torch.Tensor) -> torch.Tensor:
    """Sum of `counts` (rows, tokens, ...) over the tokens of each sequence before a worker's piece, for each of its
    tokens; 0 if the worker has all tokens. Collective over the workers that share sequences."""
    if _active is None or _active.group is None:
        return torch.zeros_like(counts)
    pieces = torch.stack([piece.sum(1) for piece in counts.chunk(len(_active.pieces()), dim=1)])
    everyone = [torch.empty_like(pieces) for _ in range(_active.size)]
    dist.all_gather(everyone, pieces, group=_active.group)
    whole = torch.zeros((_active.size * len(pieces), *pieces.shape[1:]), dtype=counts.dtype, device=counts.device)
    for rank, its in enumerate(everyone):
        whole[dataclasses.replace(_active, rank=rank).pieces()] = its
    before = (whole.cumsum(0) - whole)[_active.pieces()]
    # what a worker counts in its own first piece is before its second one, and in the caller's sums already
    own = pieces.cumsum(0) - pieces
    length = counts.shape[1] // len(pieces)
    return (before - own).movedim(0, 1).repeat_interleave(length, dim=1)


@contextlib.contextmanager
def whole_sequences() -> Iterator[None]:
    """Context in which this worker computes alone with whole sequences, for example in an evaluation by generation."""
    global _active
    before, _active = _active, None
    try:
        yield
    finally:
        _active = before


@contextlib.contextmanager
def sequences_shared(model: torch.nn.Module, context: Context) -> Iterator[None]:
    """Context in which workers share each sequence. Raises WorkloadError at the end of a forward pass of `model` that
    called no attention with an exchange, since its tokens would not attend to those of other workers."""
    global _active
    _active = context
    F.scaled_dot_product_attention = _shared_attention
    was_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it is one kernel, which calls no attention
    hook = model.register_forward_hook(functools.partial(_check_pass, context))
    try:
        yield
    finally:
        hook.remove()
        if _active is context:  # else another training has begun
            _active = None
            F.scaled_dot_product_attention = _attention
            torch.backends.mha.set_fastpath_enabled(was_fast)


def _check_pass(context: Context, model: torch.nn.Module, inputs: Any, output: Any) -> None:
    if _active is None:
        return
    if not context.num_exchanges:
        raise WorkloadError.problem(
            "the model",
            "called no scaled_dot_product_attention: under parallel.context its tokens would not see those of other "
            "workers",
            "let its attention call torch.nn.functional.scaled_dot_product_attention, or use other degrees",
        )
    context.num_exchanges = 0


def _shared_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` over all tokens of the group, given this worker's part of queries, keys and
    values. Collective."""
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if _active is None:
        return _attention(query, key, value, attn_mask=attn_mask, **options)
    _check_call(_active, query, key, value, attn_mask, dropout_p, is_causal)
    _active.num_exchanges += 1
    if _active.group is None:
        return _attention(query, key, value, **options)
    if _active.exchange == "ring":
        return ring_attention(query, key, value, _active.group, _active.run, is_causal=is_causal, scale=scale)
    query, key, value = _to_heads(_active, query, key, value)
    return _to_tokens(_active, _attention(query, key, value, **options))


def _check_call(
    context: Context,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> None:
    if not context.has_cut:
        raise WorkloadError.problem(
            "the workload",
            "gives the model whole sequences, but parallel.context needs only this worker's tokens",
            "in loss() and metrics(), cut tensors along the sequence: scaleray.parallel.part(tokens, dim=1)",
        )
    if attn_mask is not None and context.has_values:
        raise WorkloadError.problem(
            "the model's attention",
            "has a mask, but each worker has only the part for its own tokens",
            "use is_causal, pack rows instead of padding them, or leave parallel.context out",
        )
    if query.ndim != 4 or (is_causal and query.shape[2] != key.shape[2]):
        raise WorkloadError.problem(
            "the model's attention",
            f"has queries of shape {tuple(query.shape)} and keys of shape {tuple(key.shape)}: "
            "parallel.context needs (rows, heads, tokens, width), and as many queries as keys where it is causal",
        )
    if context.exchange == "heads":
        for name, heads in (("query", query.shape[1]), ("key and value", key.shape[1])):
            heads //= context.heads_on
            if heads % context.size:
                raise WorkloadError(
                    "parallel.context", context.size, f"by heads it must divide the {heads} {name} heads of a worker",
                    "use --context.exchange ring",
                )  # fmt: skip
    elif dropout_p:
        raise WorkloadError.problem(
            "the model's attention",
            f"has dropout {dropout_p:g}, which a ring does not support",
            "set it to 0, or use --context.exchange heads",
        )


class _AllToAll(torch.autograd.Function):
    """Exchange of equal parts along the first dimension (workers, ...), which is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, context: Context) -> torch.Tensor:
        ctx.context = context
        received = torch.empty_like(tensor)
        context.run(functools.partial(dist.all_to_all_single, received, tensor, group=context.group), tensor)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(gradients[0].contiguous(), ctx.context), None


class _Sum(torch.autograd.Function):
    """Sum over a group in which each worker uses the result for its part of one loss."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = tensor.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Sum.apply(gradients[0], ctx.group), None


def _to_heads(context: Context, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """All tokens of this worker's heads, from tensors (rows, heads, tokens, width) with its own tokens of all heads."""
    cut = [tensor.unflatten(1, (context.size, -1)).movedim(1, 0) for tensor in tensors]
    flat = torch.cat([tensor.flatten(1) for tensor in cut], dim=1)
    received = _AllToAll.apply(flat, context).split([tensor[0].numel() for tensor in cut], dim=1)
    whole = []
    for tensor, its in zip(cut, received, strict=True):
        whole.append(its.reshape(tensor.shape).movedim(0, 2).flatten(2, 3))
    return whole


def _to_tokens(context: Context, tensor: torch.Tensor) -> torch.Tensor:
    """The inverse of `_to_heads`: this worker's tokens of all heads."""
    cut = tensor.unflatten(2, (context.size, -1)).movedim(2, 0).contiguous()
    received: torch.Tensor = _AllToAll.apply(cut, context)
    return received.movedim(0, 1).flatten(1, 2)
