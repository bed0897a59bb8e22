"""How a published row trained: its layout, and the time of its step from whatever unit the source prints.

FLOP conventions differ: Megatron, Azure and BLOOM count four passes (with recomputation), Megatron-Core and MFU count
the model's own.
"""

from __future__ import annotations

import statistics
from typing import Any

from jobs.planner_evidence.published.fields import number, part, text, whole
from scaleray.config.hardware.hardware_kinds import Cluster, Gpu
from scaleray.errors import ConfigError
from scaleray.planner.cost.layout import Checkpointing, Engine, Layout, Schedule, Sharding
from scaleray.planner.models.block_counts import ModelProfile

RECIPES = ("NeMo", "Megatron-Bridge", "Megatron Bridge")
"""Frameworks whose published recipes shard the optimizer and divide norms along the sequence without a word about
it."""


def layout_of(parallelism: dict[str, Any], model: ModelProfile, cluster: Cluster, row: dict[str, Any]) -> Layout:
    """The degrees, the batch and what is recomputed. Raises ConfigError where the degrees do not make up the GPUs."""
    said = f"{text(parallelism, 'strategy')} {text(parallelism, 'sharding')}"
    framework, planned = text(parallelism, "framework"), text(parallelism, "schedule")
    num_gpus = cluster.num_gpus if cluster.num_nodes > 1 else cluster.gpus_per_node
    tensor, pipeline, context = (whole(parallelism, key) or 1 for key in ("tp", "pp", "cp"))
    is_core = "megatron_core" in row["file"]
    if "strong scaling" in said and not parallelism.get("tp"):
        tensor, pipeline = 8, 6 if num_gpus % 48 == 0 else 1  # Megatron-Core's 177B runs, as its table lays them out
    rest = num_gpus // (tensor * pipeline * context)
    parts = (whole(parallelism, "dp_shard") or 1) * (whole(parallelism, "dp_replicate") or 1)
    data = whole(parallelism, "dp") or (parts if parts > 1 else max(1, rest))
    if data * tensor * pipeline * context != num_gpus and data == rest * context:
        data = rest  # context parallel ranks counted among the replicas, as those that share out their state
    expert = whole(parallelism, "ep", "expert_parallel", "expert") or 1
    if expert > 1 and data * tensor * pipeline * context * expert == num_gpus:
        # expert parallel ranks counted beside the replicas, whose batch they share out
        data *= expert
        if (whole(parallelism, "micro_batch", "mbs") or 0) % expert == 0:
            parallelism = parallelism | {"micro_batch": (whole(parallelism, "micro_batch", "mbs") or 0) // expert}
    if data * tensor * pipeline * context != num_gpus:
        raise ConfigError(
            "degrees", data * tensor * pipeline * context, f"their product must be the number of GPUs, {num_gpus}"
        )
    micro_batch, accumulation = _batch_of(parallelism, model, data, pipeline, said)
    sharding, shard = _sharding(said, data, cluster, parallelism)
    is_megatron = (
        any(word in said + framework + planned for word in ("Megatron", "NeMo", "PTD-P", "interleaved"))
        or "interleave" in parallelism
        or "megatron" in row["file"]
    )
    overlap = text(parallelism, "overlap")
    # interleaved, but nothing says how finely: two parts a stage; four where the stages' sends are hidden as well
    unsaid = 4 if "PP" in overlap or is_core else 2 if "interleaved" in planned.lower() else 1
    chunks = (whole(parallelism, "interleave", "vp", "vpp", "virtual_pipeline") or unsaid) if pipeline > 1 else 1
    precision = precision_of(parallelism.get("precision"), cluster.gpu)
    gradient_bytes, gather_bits = _widths(said, precision, sharding, parallelism)
    if sharding == "zero3" and pipeline > 1:
        # gathered and reduced once a step, not for each micro-batch: torchtitan keeps parameters whole under a
        # pipeline, so does Llama 3 (arXiv:2407.21783, section 3.3.2), and gradients wait whole for the last micro-batch
        sharding, shard = "zero1", 1
    if (
        sharding == "none"
        and data > 1
        and ("param gather" in overlap or is_core or any(word in framework for word in RECIPES))
    ):
        sharding = "zero1"
    if is_core:
        gradient_bytes = 2  # its recipes reduce in the precision they train in
    # KempnerForge moves the whole model, and with it the moments, to 16 bit, and reduces once a step
    # (training/grad.py); it gathers the logits of tensor parallel for the loss (distributed/tensor_parallel.py).
    # nanotron fills its stages in turn (models/base.py)
    is_kempner, is_nanotron = "kempnerforge" in text(part(row, "model"), "name").lower(), "nanotron" in said
    is_titan = "FSDP2" in said and tensor > 1  # torchtitan's tensor parallel plans divide norms along the sequence
    return Layout(
        filled_stages=is_nanotron,
        engine=_engine(f"{said} {framework} {row['file']}".lower()),
        # torch reduces the gradients of a pipeline's stage after its last micro-batch
        accumulates_whole=is_kempner or ("FSDP2" in said and pipeline > 1),
        splits_logits=not is_kempner,
        optimizer_bytes=4 if is_kempner else 8,
        data=data,
        shard=shard,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        micro_batch=micro_batch,
        accumulation=accumulation,
        expert=_expert_degree(parallelism, model, data * context * tensor),
        sharding=sharding,
        # billions of parameters on ZeRO-3 without a word about it: DeepSpeed's own examples recompute
        checkpointing=_checkpointing(
            parallelism.get(
                "activation_checkpointing", "full" if sharding == "zero3" and "eepspeed" in row["file"] else None
            )
        ),
        sequence_parallel=bool(parallelism.get("sequence_parallel"))
        or is_titan
        or is_kempner
        or "reduce-scatter" in said
        or "with sequence" in said
        or "TP comm overlap" in overlap
        or is_core
        or any(word in framework for word in RECIPES),
        schedule=_schedule(f"{said} {planned}".lower(), pipeline, chunks),
        chunks=chunks,
        even_stages=is_megatron,
        keeps_gathered=not is_megatron and not said.startswith("TP x PP"),
        precision=precision,
        is_mixed=precision not in ("fp32", "tf32") and not is_kempner,
        gradient_bytes=gradient_bytes,
        gather_bits=gather_bits,
        compiled=bool(parallelism.get("compile"))
        or "nvfuser" in text(parallelism, "compiler")
        or "torchcompile" in text(parallelism, "compiler"),
        overlaps_tensor="TP comm overlap" in overlap or is_core or ("async" in said.lower() and "no async" not in said),
        overlaps_data=not (
            is_megatron and pipeline == 1 and "overlap" not in parallelism and "core" not in row["file"]
        ),
        overlaps_gather="param gather" in overlap or "core" in row["file"] or "FSDP" in said,
        offloads="ffload" in said or bool(parallelism.get("cpu_offload")),
    )


def _engine(said: str) -> Engine:
    if "deepspeed" in said:
        return "deepspeed"
    return "planned" if any(word in said for word in ("oneflow", "maxtext", "jax")) else "torch"


def _batch_of(parallelism: dict[str, Any], model: ModelProfile, data: int, pipeline: int, said: str) -> tuple[int, int]:
    """Samples of a micro-batch, and micro-batches of a step."""
    tokens = whole(parallelism, "tokens_per_gpu_per_micro_batch")
    micro_batch = max(1, tokens // model.tokens_per_sample) if tokens else whole(parallelism, "micro_batch", "mbs") or 0
    global_batch = whole(parallelism, "global_batch_seqs", "global_batch", "gbs")
    accumulation = whole(parallelism, "grad_accum") or 0
    # a rank's whole batch, which a pipeline cuts below
    local_batch = whole(parallelism, "local_batch", "local_batch_size")
    if local_batch and not micro_batch and not accumulation:
        micro_batch = local_batch
    if not micro_batch and global_batch:
        per_replica = max(1, global_batch // data)
        # the micro-batch is not said: one sequence where many stages or shards wait, else all at once
        micro_batch = per_replica if pipeline == 1 and data == 1 else 1 if pipeline > 1 else min(4, per_replica)
    if not micro_batch and not parallelism.get("max_batch") and "pure data parallel" not in said:
        raise ConfigError("micro_batch", None, "a row must say how many samples a pass holds")
    micro_batch = micro_batch or whole(parallelism, "max_batch") or 1
    if global_batch and not accumulation:
        accumulation = max(1, round(global_batch / (data * micro_batch)))
    if pipeline > 1 and accumulation <= 1 and micro_batch > 1:
        accumulation = next(pieces for pieces in range(min(pipeline, micro_batch), 0, -1) if micro_batch % pieces == 0)
        micro_batch //= accumulation
    return micro_batch, max(1, accumulation)


def _expert_degree(parallelism: dict[str, Any], model: ModelProfile, ranks: int) -> int:
    """Expert-parallel degree as given; 1 for a model without experts.

    Raises ConfigError where it does not divide experts or ranks.
    """
    degree = whole(parallelism, "ep", "expert_parallel", "expert") or 1
    experts = model.num_experts
    if degree == 1 or not experts:
        return 1
    if experts % degree or ranks % degree:
        raise ConfigError("ep", degree, f"it must divide {experts} experts and {ranks} ranks of a stage")
    return degree


def precision_of(text: Any, gpu: Gpu) -> str:
    """`amp_bf16`, `apex amp`, `float8`, `fp16 mixed` in the planner's words; the GPU's usual 16 bits where nothing is
    said."""
    said = str(text or "").lower()
    usual = "bf16" if "bf16" in gpu.peak_tflops else "fp16"
    if "fp4" in said:
        return "fp4"
    if "float8" in said or "fp8" in said:
        return "fp8"
    if "bf16" in said:
        return "bf16"
    if "fp16" in said:
        return "fp16"
    if "tf32" in said:
        return "tf32"
    if "fp32" in said:
        # PyTorch before 1.12 ran fp32 products on A100 as tf32
        return "tf32" if "tf32" in gpu.peak_tflops else "fp32"
    return "fp16" if "amp" in said or "mixed" in said else usual


def step_time_of(row: dict[str, Any], model: ModelProfile, layout: Layout) -> float | None:
    """Seconds of an optimizer step, from the first of the row's figures that says it."""
    measured, derived = part(row, "measured"), part(row, "derived")
    samples = layout.global_batch
    tokens = samples * model.tokens_per_sample
    step = number(measured, "step_time_s", "iteration_time_s", "time_per_step_s")
    if step is not None:
        by_rate = _from_flops(row, model, layout)
        if by_rate is not None and not 0.6 < step / by_rate < 1.6:
            raise ConfigError(
                "the row",
                f"{step:.4g} s",
                f"its own rate says {by_rate:.4g} s: batch or layers are not what is printed",
            )
        return step
    in_ms = number(measured, "step_time_ms", "iteration_ms", "iteration_time_ms")
    if in_ms is not None:
        return in_ms / 1e3
    iterations = measured.get("step_time_ms_iterations_8_to_12")
    if isinstance(iterations, list) and any(iterations):
        return statistics.median(float(value) for value in iterations if value) / 1e3
    micro_step = number(measured, "micro_step_time_s")
    if micro_step is not None:
        return micro_step * layout.accumulation
    stated = number(derived, "step_time_s")
    if stated is not None:
        return stated
    for units, names in (
        (tokens / layout.num_gpus, ("tokens_per_s_per_gpu", "tokens_per_s_per_chip", "tokens_per_s_per_device")),
        (tokens, ("tokens_per_s",)),
        (samples, ("sequences_per_s", "samples_per_s", "images_per_s")),
        (samples / layout.num_gpus, ("sequences_per_s_per_gpu", "samples_per_s_per_gpu", "images_per_s_per_gpu")),
    ):
        rate = number(measured, *names)
        if rate is not None:
            return float(units / rate)
    return _from_flops(row, model, layout)


def _from_flops(row: dict[str, Any], model: ModelProfile, layout: Layout) -> float | None:
    measured = part(row, "measured")
    hardware = number(measured, "hardware_tflops_per_gpu", "hardware_tflops_per_chip")
    rate = hardware or number(
        measured,
        "tflops_per_gpu",
        "model_tflops_per_gpu",
        "tflops_per_gpu_digitized",
        "tflops_per_chip",
        "model_tflops_per_chip",
        "tflops",
    )
    total = number(measured, "total_tflops")
    if rate is None and total is not None:
        rate = total / layout.num_gpus
    if rate is None or not model.has_flops:
        return None
    # the conventions count attention whole, whatever the mask
    full = model.forward_flops + sum(
        block.attention_flops * block.count
        for block in model.blocks
        if block.attention_flops and _is_halved(block.attention_flops, model)
    )
    # the paper of PTD-P counts the pass that is computed again (arXiv:2104.04473, appendix); later Megatron does not
    counts_again = hardware is not None or (
        "PTD-P" in text(part(row, "parallelism"), "strategy") and layout.checkpointing == "full"
    )
    return full * (4.0 if counts_again else 3.0) * layout.global_batch / (rate * 1e12 * layout.num_gpus)


def _is_halved(attention_flops: float, model: ModelProfile) -> bool:
    """Whether the profile skips the masked half."""
    layer = next(block for block in model.blocks if block.attention_flops)
    width = model.num_heads * layer.head_dim
    return attention_flops < 3.0 * model.tokens_per_sample**2 * width


def _schedule(said: str, pipeline: int, chunks: int) -> Schedule:
    if pipeline > 1 and ("zero bubble" in said or "zero-bubble" in said or "zbv" in said):
        return "zero_bubble"
    if chunks > 1:
        return "interleaved"
    return "gpipe" if "gpipe" in said else "1f1b"


def _checkpointing(value: Any) -> Checkpointing:
    said = str(value).lower()
    if value is True or said in ("full", "recompute", "offload", "true"):
        return "full"
    if "attention" in said:
        return "selective"
    return "alternate" if "selective" in said else "none"


def _sharding(said: str, data: int, cluster: Cluster, parallelism: dict[str, Any]) -> tuple[Sharding, int]:
    said = said.lower()
    shard, replicate = whole(parallelism, "dp_shard"), whole(parallelism, "dp_replicate")
    if shard and replicate and 1 < shard < data == shard * replicate:
        return "zero3", shard
    if "hsdp" in said or "hybrid_shard" in said:
        inside = min(data, cluster.gpus_per_node)
        return "zero3", inside if data % inside == 0 else data
    if any(word in said for word in ("zero-2", "zero 2", "zero2")):
        return "zero2", 1
    # SHARD_GRAD_OP, which gathers once and not twice, is not told apart: FSDP's units are kept
    if any(word in said for word in ("fsdp", "zero-3", "zero 3", "zero3", "zero++", "full_shard", "fully sharded")):
        # slices of TPUs are replicas of each other: parameters are not gathered over the data centre's network
        is_sliced = cluster.gpu.name.startswith("tpu") and cluster.num_nodes > 1 and data % cluster.gpus_per_node == 0
        return "zero3", cluster.gpus_per_node if is_sliced else data
    return (
        ("zero1", 1)
        if any(word in said for word in ("zero-1", "zero 1", "zero1", "distributed optimizer"))
        else ("none", 1)
    )


def _widths(text: str, precision: str, sharding: Sharding, parallelism: dict[str, Any]) -> tuple[float, int]:
    """Bytes of a gradient element and bits of a parameter on the wire."""
    if "ZeRO++" in text:
        return 0.5, 4  # 4-bit gradients; 8-bit gathers, of which the backward one stays in the node
    if "1-bit" in text:
        return 2 / 16, 16
    if sharding == "zero3":
        pure = parallelism.get("fsdp_mixed_precision") == "PURE" or precision == "fp16"
        return (2 if pure else 4), (8 if precision in ("fp8", "fp4") else 16)
    return (4 if precision in ("fp32", "tf32", "bf16") else 2), 16
