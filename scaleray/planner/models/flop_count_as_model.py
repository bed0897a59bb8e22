"""A user's own model in the planner's form, as counted by `training.flop_counter`."""

from dataclasses import replace
from pathlib import Path

from scaleray.errors import UsageError, first_line
from scaleray.planner.models.block_counts import Block, Matmul, ModelProfile
from scaleray.records.workload_profile import PartProfile, WorkloadProfile


def read_profile(path: Path) -> ModelProfile:
    """Read a profile written by `WorkloadProfile.to_json`. Raises UsageError for anything else."""
    try:
        return from_workload(WorkloadProfile.from_json(path.read_text()), name=path.stem)
    except (OSError, ValueError) as exc:  # pydantic's errors are ValueErrors
        raise UsageError.problem(
            "--profile", f"{path} cannot be read as a counted workload: {first_line(exc)}"
        ) from exc


def from_workload(profile: WorkloadProfile, *, name: str) -> ModelProfile:
    """Convert the counted parts to blocks, combining equal neighbours into one repeated block. The count does not show
    how tensor parallelism would split them."""
    widths = 2.0 if profile.precision in ("fp32", "fp64") else 1.0
    first, *inner, last = (
        profile.parts if len(profile.parts) > 1 else [PartProfile(name="nothing", num_parameters=0), *profile.parts]
    )
    grouped: list[Block] = []
    for block in (_block(part, widths, boundary) for part, boundary in _with_inputs([first, *inner])):
        same = grouped and replace(grouped[-1], name=block.name, count=1) == block
        grouped = [*grouped[:-1], replace(grouped[-1], count=grouped[-1].count + 1)] if same else [*grouped, block]
    tail = _block(last, widths, (inner or [first])[-1].output_bytes)
    has_attention = any(part.attention_flops for part in profile.parts)
    tokens = profile.count_per_sample if profile.count_per_sample and profile.count_per_sample > 1 else 1
    convolves = any(part.convolution_flops for part in profile.parts)
    return ModelProfile(
        name=name,
        blocks=(*grouped, tail),
        tokens_per_sample=round(tokens),
        kind="cnn" if convolves and not has_attention else "transformer",
        largest_tensor_params=float(first.num_parameters),
        notes=("counted from the workload; tensor parallelism is omitted, since the count has no splits of layers",),
    )


def _with_inputs(parts: list[PartProfile]) -> list[tuple[PartProfile, float]]:
    """Each part with the bytes of its input: the output of the previous one."""
    given = [0.0, *(part.output_bytes for part in parts[:-1])]
    return list(zip(parts, given, strict=True))


def _block(part: PartProfile, widths: float, boundary_bytes: float) -> Block:
    products = tuple(Matmul(product.rows, product.columns, product.inner) for product in part.products)
    return Block(
        name="part",
        num_params=float(part.num_parameters),
        matmuls=products,
        attention_flops=part.attention_flops,
        conv_flops=part.convolution_flops,
        winograd_flops=part.winograd_flops,
        traffic_bytes=part.traffic_bytes / widths,
        kept_bytes=part.activation_bytes / widths,
        boundary_bytes=boundary_bytes / widths,
        num_kernels=part.num_operations,
    )
