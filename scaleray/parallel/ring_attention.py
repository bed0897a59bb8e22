"""Attention in which keys and values pass around a ring of workers, while each computes with those it has."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Block = tuple[slice, slice, bool]
"""Queries and keys that are computed together, and whether attention is causal."""
ALL = slice(None)
Run = Callable[[Callable[[], Any], torch.Tensor], Any]
Link = tuple[dist.ProcessGroup, Run]


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    run: Run,
    *,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Attention (rows, heads, tokens, width) of this worker's queries over the keys and values of all workers.
    Collective. Key heads may be fewer if they divide the query heads. run: starts a send with its payload."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    found: torch.Tensor = _Ring.apply(query, torch.stack([key, value]), (group, run), is_causal, scale)
    return found


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, pair: torch.Tensor, link: Link, is_causal: bool, scale: float
    ) -> torch.Tensor:
        ring = _Neighbours(*link)
        query, pair = query.contiguous(), pair.contiguous()
        dtype = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros(query.shape, dtype=dtype, device=query.device)
        log_sum = torch.full(query.shape[:-1], -torch.inf, dtype=dtype, device=query.device)
        held = pair
        with torch.autocast(query.device.type, enabled=False):
            for step in range(ring.size):
                is_last = step == ring.size - 1
                arriving, works = (held, []) if is_last else ring.pass_on(held)
                block = _block(ring, step, query.shape[2], is_causal)
                _merge(output, log_sum, block, *_attend(query, held, block, scale))
                ring.wait(works)
                held = arriving
        result = output.to(query.dtype)
        ctx.save_for_backward(query, pair, result, log_sum)
        ctx.options = link, is_causal, scale
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        """The gradients of keys and values travel with them, one worker behind, and finally arrive at their owner."""
        query, pair, output, log_sum = ctx.saved_tensors
        link, is_causal, scale = ctx.options
        ring, gradient = _Neighbours(*link), gradients[0].contiguous()
        of_query = torch.zeros(query.shape, dtype=log_sum.dtype, device=query.device)
        of_pair = torch.zeros(pair.shape, dtype=log_sum.dtype, device=pair.device)
        held = pair
        travelling: list[Any] = []
        with torch.autocast(query.device.type, enabled=False):
            for step in range(ring.size):
                arriving, works = (held, []) if step == ring.size - 1 else ring.pass_on(held)
                queries, keys, _ = block = _block(ring, step, query.shape[2], is_causal)
                saved = gradient[:, :, queries], output[:, :, queries], log_sum[:, :, queries]
                own_query, own_pair = _attend_backward(query, held, block, scale, *saved)
                of_query[:, :, queries] += own_query
                ring.wait(travelling)
                of_pair[:, :, :, keys] += own_pair
                of_pair, travelling = ring.pass_on(of_pair, tag=1)
                ring.wait(works)
                held = arriving
            ring.wait(travelling)
        return of_query.to(query.dtype), of_pair.to(pair.dtype), None, None, None


class _Neighbours:
    """Ring of the workers of a group, each of which sends to the next and receives from the one before."""

    def __init__(self, group: dist.ProcessGroup, run: Run) -> None:
        self._run = run
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self._kept: list[torch.Tensor] = []

    def pass_on(self, tensor: torch.Tensor, tag: int = 0) -> tuple[torch.Tensor, list[Any]]:
        """Begin to send a tensor to the next worker. Returns the arriving tensor, and the operations to wait for."""
        arriving = torch.empty_like(tensor)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        sends = dist.P2POp(dist.isend, tensor, group=self.group, tag=tag, group_peer=after)
        receives = dist.P2POp(dist.irecv, arriving, group=self.group, tag=tag, group_peer=before)
        self._kept = [*self._kept[-3:], tensor]  # until it is sent
        return arriving, self._run(lambda: dist.batch_isend_irecv([sends, receives]), tensor)

    @staticmethod
    def wait(works: list[Any]) -> None:
        """Wait until the tensors that `pass_on` sends and receives have arrived."""
        for work in works:
            work.wait()


def _block(ring: _Neighbours, step: int, tokens: int, is_causal: bool) -> Block:
    """Queries and keys of one step. With causal attention, each worker has an early and a late piece of a sequence.
    With the keys of an earlier worker, all queries need its early piece; with those of a later worker, late queries
    need all."""
    source, half = (ring.rank - step) % ring.size, tokens // 2
    if not is_causal or source == ring.rank:
        return ALL, ALL, is_causal
    return (ALL, slice(half), False) if source < ring.rank else (slice(half, None), ALL, False)


def _attend(query: torch.Tensor, pair: torch.Tensor, block: Block, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a block, and the log-sum-exp of its scores (rows, heads, tokens)."""
    queries, keys, is_causal = block
    query, (key, value) = query[:, :, queries], _repeated(pair[:, :, :, keys], query)
    if query.is_cpu:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )
        return found[0], found[1]
    scores = _scores(query, key, is_causal, scale)
    log_sum = scores.logsumexp(-1)
    return (scores - log_sum[..., None]).exp().to(value.dtype) @ value, log_sum


def _attend_backward(
    query: torch.Tensor,
    pair: torch.Tensor,
    block: Block,
    scale: float,
    gradient: torch.Tensor,
    output: torch.Tensor,
    log_sum: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of a block's queries and of its keys and values, given the output and log-sum-exp over all keys."""
    queries, keys, is_causal = block
    groups = query.shape[1] // pair.shape[2]
    query, (key, value) = query[:, :, queries], _repeated(pair[:, :, :, keys], query)
    if query.is_cpu:
        of_query, *of_pair = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, log_sum, 0.0, is_causal, scale=scale
        )
    else:
        weights = (_scores(query, key, is_causal, scale) - log_sum[..., None]).exp()
        along = (gradient * output).sum(-1, keepdim=True)
        of_scores = (weights * (gradient @ value.mT - along)).to(query.dtype) * scale
        of_query, of_pair = of_scores @ key, [of_scores.mT @ query, weights.to(gradient.dtype).mT @ gradient]
    return of_query, torch.stack([each.unflatten(1, (-1, groups)).sum(2) for each in of_pair])


def _scores(query: torch.Tensor, key: torch.Tensor, is_causal: bool, scale: float) -> torch.Tensor:
    scores = (query @ key.mT).to(torch.promote_types(query.dtype, torch.float32)) * scale
    if not is_causal:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(later, -torch.inf)


def _repeated(pair: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys and values, repeated so that they have as many heads as the queries."""
    groups = query.shape[1] // pair.shape[2]
    return pair if groups == 1 else pair.repeat_interleave(groups, dim=2)


def _merge(
    output: torch.Tensor, log_sum: torch.Tensor, block: Block, found: torch.Tensor, its_log_sum: torch.Tensor
) -> None:
    """Merge a block's attention into the output so far, in place, each weighted by its sum of exponentials."""
    queries = block[0]
    both = torch.logaddexp(log_sum[:, :, queries], its_log_sum)
    output[:, :, queries] *= (log_sum[:, :, queries] - both).exp()[..., None]
    output[:, :, queries] += found * (its_log_sum - both).exp()[..., None]
    log_sum[:, :, queries] = both
