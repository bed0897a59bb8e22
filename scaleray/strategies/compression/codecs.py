"""Ways to send a bucket of gradients in fewer bytes. Each replaces a rank's values by a mean over the ranks.

`mean_` returns the residual that this rank did not send. Added to the rank's next gradient (error feedback), it is only
delayed, not lost: the mean over ranks of everything sent, plus the mean residual, is the sum of the true mean
gradients. Sources: Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019, arXiv:1901.09847.

Non-finite values stay non-finite on every rank, since a loss scaler must see them. Every rank gets the same mean, bit
by bit, and calls the same collectives, whose number and size do not depend on values."""

import math
import zlib
from dataclasses import dataclass
from typing import Protocol

import torch

from scaleray.strategies.traffic.collectives_log import GroupCollectives, Message, pack, unpack

LARGEST_INT8 = 127


@dataclass(frozen=True)
class Part:
    """Position of a parameter in a bucket. rows: number of matrix rows of its values in memory; 1 if it is not a
    matrix."""

    name: str
    start: int
    size: int
    rows: int


@dataclass(frozen=True)
class Layout:
    """Positions of all parameters in a bucket. element_size: bytes of a value in the type used for computing."""

    parts: tuple[Part, ...]
    element_size: int

    @property
    def size(self) -> int:
        """Number of values in the bucket."""
        return sum(part.size for part in self.parts)


class Codec(Protocol):
    """Way to send a bucket. values: flat (n,), in at least float32."""

    def mean_(self, values: torch.Tensor, collectives: GroupCollectives, layout: Layout) -> torch.Tensor:
        """Replace `values` by the mean of what all ranks send; returns this rank's residual (n,). Collective."""

    def seen(self, values: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Values that other ranks would receive in place of these. Nothing is sent."""

    def messages(self, layout: Layout, world_size: int) -> list[Message]:
        """Collectives that `mean_` will call."""


class Whole:
    """Codec that sends everything unchanged."""

    def mean_(self, values: torch.Tensor, collectives: GroupCollectives, layout: Layout) -> torch.Tensor:
        collectives.mean_(values)
        return torch.zeros_like(values)

    def seen(self, values: torch.Tensor, layout: Layout) -> torch.Tensor:
        return values

    def messages(self, layout: Layout, world_size: int) -> list[Message]:
        return [Message("all_reduce", layout.size * layout.element_size)]


class Cast:
    """Codec that rounds to 16 bits and sums in this type. fp16 has 11 significant bits and a maximum of 65504; bf16 has
    8 bits and the range of float32.

    A mean beyond fp16's range becomes infinite, so a loss scaler reduces its scale. Rounding is relative, so there is
    no error feedback. Sums are rounded too, once per rank."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def mean_(self, values: torch.Tensor, collectives: GroupCollectives, layout: Layout) -> torch.Tensor:
        small = (values / collectives.world_size).to(self.dtype)
        left = values - small.to(values.dtype) * collectives.world_size
        values.copy_(collectives.sum_(small))
        return left

    def seen(self, values: torch.Tensor, layout: Layout) -> torch.Tensor:
        return values.to(self.dtype).to(values.dtype)

    def messages(self, layout: Layout, world_size: int) -> list[Message]:
        return [Message("all_reduce", layout.size * self.dtype.itemsize)]


class Int8:
    """Codec with one byte per value and a float32 scale per block, in which the block's largest value is 127 (Dettmers
    2015, arXiv:1511.04561).

    An error is at most half a scale. Bytes cannot be added in transit, and with an all-gather each rank would receive
    world_size - 1 buckets, which is more than DDP's ring from 9 ranks on. So each rank averages one part: an all-to-all
    brings it the bytes of that part from all ranks, it rounds the mean again, and an all-gather distributes it. This
    sends 2 (world_size - 1) / world_size bytes per value over a link, a quarter of float32's for any number of ranks.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def mean_(self, values: torch.Tensor, collectives: GroupCollectives, layout: Layout) -> torch.Tensor:
        count, ranks = values.numel(), collectives.world_size
        block, share = self._shape(count, ranks)
        format_ = (torch.float32, share // block), (torch.int8, share)
        rows = _padded(values, ranks * share).view(ranks, share)
        scales, codes = quantise(rows, block)
        arrived = dequantise(*unpack(collectives.all_to_all(pack(scales, codes)), *format_), dtype=values.dtype)
        arrived[collectives.rank] = rows[collectives.rank]  # a rank knows its own part exactly
        mean = (arrived / ranks).sum(dim=0, keepdim=True)
        mean_scales, mean_codes = quantise(mean, block)
        left = rows - dequantise(scales, codes, dtype=values.dtype)
        # What the second rounding loses is lost once, and this rank's next values count 1 / ranks in the mean. As its
        # own part is not rounded on the way here, the place is free.
        left[collectives.rank] = (mean - dequantise(mean_scales, mean_codes, dtype=values.dtype))[0] * ranks
        everyone = collectives.all_gather(pack(mean_scales, mean_codes)[0])
        values.copy_(dequantise(*unpack(everyone, *format_), dtype=values.dtype).view(-1)[:count])
        return left.view(-1)[:count]

    def seen(self, values: torch.Tensor, layout: Layout) -> torch.Tensor:
        block = min(self.block_size, values.numel())
        rows = _padded(values, -(-values.numel() // block) * block).view(1, -1)
        return dequantise(*quantise(rows, block), dtype=values.dtype).view(-1)[: values.numel()]

    def messages(self, layout: Layout, world_size: int) -> list[Message]:
        block, share = self._shape(layout.size, world_size)
        row = share + 4 * (share // block)
        return [Message("all_to_all", world_size * row), Message("all_gather", row)]

    def _shape(self, count: int, ranks: int) -> tuple[int, int]:
        """Number of values in a block, and number of values that one rank averages, in whole blocks."""
        block = min(self.block_size, -(-count // ranks))
        return block, -(-count // (ranks * block)) * block


class TopK:
    """Codec that sends the largest values of a bucket with their indices; the others accumulate until they are large
    (Lin et al. 2017, arXiv:1712.01887).

    Sparsification and accumulation follow that paper, without its momentum correction and local clipping. Each rank
    receives the values of all others, so it moves fewer bytes than DDP only for a density below 1 / world_size."""

    def __init__(self, density: float) -> None:
        self.density = density

    def mean_(self, values: torch.Tensor, collectives: GroupCollectives, layout: Layout) -> torch.Tensor:
        places = self._largest(values)
        count, place_dtype = places.numel(), self._place_dtype(values.numel())
        message = pack(values[places].view(1, -1), places.to(place_dtype).view(1, -1))[0]
        left = values.clone()
        left[places] = 0.0
        theirs, at = unpack(collectives.all_gather(message), (values.dtype, count), (place_dtype, count))
        values.zero_()
        for some, where in zip(theirs, at, strict=True):  # in rank order; a rank's places are distinct
            values.index_add_(0, where.long(), some)
        values.div_(collectives.world_size)
        return left

    def seen(self, values: torch.Tensor, layout: Layout) -> torch.Tensor:
        places = self._largest(values)
        return torch.zeros_like(values).index_copy_(0, places, values[places])

    def messages(self, layout: Layout, world_size: int) -> list[Message]:
        each = layout.element_size + self._place_dtype(layout.size).itemsize
        return [Message("all_gather", self._count(layout.size) * each)]

    def _largest(self, values: torch.Tensor) -> torch.Tensor:
        return values.abs().topk(self._count(values.numel()), sorted=False).indices  # takes NaN for the largest of all

    def _count(self, size: int) -> int:
        return min(size, max(1, math.ceil(self.density * size)))

    def _place_dtype(self, size: int) -> torch.dtype:
        return torch.int32 if size < 2**31 else torch.int64


class PowerSGD:
    """Codec that sends each matrix as a product of two thin ones, found by one step of power iteration (Vogels et al.
    2019, arXiv:1905.13727).

    The iteration starts from the result of the last step. Vectors, and matrices that the factors would not shorten, are
    sent whole. A tensor with more dimensions counts as a matrix whose rows are its outermost dimension."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.thin: dict[str, torch.Tensor] = {}
        """Right factor (columns, rank) of the last step, by parameter name."""

    def mean_(self, values: torch.Tensor, collectives: GroupCollectives, layout: Layout) -> torch.Tensor:
        matrices, others = self._split(layout)
        views = [(part, values[part.start : part.start + part.size]) for part in (*matrices, *others)]
        left = torch.zeros_like(values)
        tall = [view.view(part.rows, -1) @ self._start(part, values) for part, view in views[: len(matrices)]]
        # whole tensors travel with the first factors
        sent = [*tall, *(view for _, view in views[len(matrices) :])]
        flat = collectives.mean_(torch.cat([tensor.flatten() for tensor in sent]))
        means = flat.split([tensor.numel() for tensor in sent])
        for (_, view), mean in zip(views[len(matrices) :], means[len(matrices) :], strict=True):
            view.copy_(mean)
        if not matrices:
            return left
        # the same numbers on every rank, thus the same basis
        bases = [
            torch.linalg.qr(mean.view(old.shape)).Q for old, mean in zip(tall, means[: len(matrices)], strict=True)
        ]
        thin = [view.view(part.rows, -1).T @ basis for (part, view), basis in zip(views, bases, strict=False)]
        for (part, view), basis, own in zip(views, bases, thin, strict=False):
            left[part.start : part.start + part.size] = view - (basis @ own.T).view(-1)
        flat = collectives.mean_(torch.cat([factor.flatten() for factor in thin]))
        for (part, view), basis, mean in zip(views, bases, flat.split([f.numel() for f in thin]), strict=False):
            factor = mean.view(-1, basis.shape[1])
            view.copy_((basis @ factor.T).view(-1))
            # a step that is not finite is skipped, and must not spoil the next one
            self.thin[part.name].copy_(torch.where(factor.isfinite().all(), factor, self.thin[part.name]))
        return left

    def seen(self, values: torch.Tensor, layout: Layout) -> torch.Tensor:
        found = values.clone()
        for part in self._split(layout)[0]:
            matrix = values[part.start : part.start + part.size].view(part.rows, -1)
            basis = torch.linalg.qr(matrix @ self._start(part, values)).Q
            found[part.start : part.start + part.size] = (basis @ (matrix.T @ basis).T).view(-1)
        return found

    def messages(self, layout: Layout, world_size: int) -> list[Message]:
        matrices, others = self._split(layout)
        tall = sum(part.rows * self.rank for part in matrices) + sum(part.size for part in others)
        thin = sum(part.size // part.rows * self.rank for part in matrices)
        return [Message("all_reduce", count * layout.element_size) for count in (tall, thin) if count]

    def shortens(self, part: Part) -> bool:
        """Whether the two factors together are smaller than the matrix."""
        return (part.rows + part.size // part.rows) * self.rank < part.size if part.rows > 1 else False

    def _split(self, layout: Layout) -> tuple[list[Part], list[Part]]:
        matrices = [part for part in layout.parts if self.shortens(part)]
        return matrices, [part for part in layout.parts if not self.shortens(part)]

    def _start(self, part: Part, values: torch.Tensor) -> torch.Tensor:
        if part.name not in self.thin:
            # the same on every rank, and no draw from a generator that dropout uses
            generator = torch.Generator().manual_seed(zlib.crc32(part.name.encode()))
            drawn = torch.randn(part.size // part.rows, self.rank, generator=generator, dtype=torch.float64)
            self.thin[part.name] = drawn.to(values.device, values.dtype)
        return self.thin[part.name]


def quantise(rows: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 scales (rows, n / block) and int8 codes (rows, n) of values; a block with a non-finite value has a
    non-finite scale."""
    blocks = rows.view(rows.shape[0], -1, block)
    scales = (blocks.abs().amax(dim=2) / LARGEST_INT8).float()
    usable = torch.where(scales > 0, scales, 1.0).to(rows.dtype)
    # only the scale tells that a value is not finite
    codes = (blocks / usable.unsqueeze(2)).nan_to_num(0.0).round().clamp(-LARGEST_INT8, LARGEST_INT8)
    return scales, codes.to(torch.int8).view(rows.shape)


def dequantise(scales: torch.Tensor, codes: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Values (rows, n) that the codes represent; not finite if the scale is not."""
    blocks = codes.view(*scales.shape, -1).to(dtype)
    return (blocks * scales.to(dtype).unsqueeze(2)).view(codes.shape)


def _padded(values: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, size - values.numel()))
