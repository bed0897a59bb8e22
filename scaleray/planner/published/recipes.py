"""How a published row trained: its layout, and the time of its step from whatever unit the source prints.

FLOP conventions differ: Megatron, Azure and BLOOM count four passes (with recomputation), Megatron-Core and MFU count the model's own.
"""

from __future__ import annotations

import statistics
from typing import Any

from scaleray.errors import ConfigError
from scaleray.planner.hardware import Cluster, Gpu
from scaleray.planner.layout import Checkpointing, Engine, Layout, Schedule, Sharding
from scaleray.planner.profile import ModelProfile


def layout_of(parallelism: dict[str, Any], model: ModelProfile, cluster: Cluster, row: dict[str, Any]) -> Layout:
    """The degrees, the batch and what is recomputed. Raises ConfigError where the degrees do not make up the GPUs."""
    text = f"{parallelism.get('strategy', '')} {parallelism.get('sharding', '')}"
    num_gpus = cluster.num_gpus if cluster.num_nodes > 1 else cluster.gpus_per_node
    tensor, pipeline, context = (int(parallelism.get(key) or 1) for key in ("tp", "pp", "cp"))
    if "strong scaling" in text and not parallelism.get("tp"):
        tensor, pipeline = 8, 6 if num_gpus % 48 == 0 else 1  # Megatron-Core's 177B runs, as its table lays them out
    rest = num_gpus // (tensor * pipeline * context)
    parts = int(parallelism.get("dp_shard") or 1) * int(parallelism.get("dp_replicate") or 1)
    data = int(parallelism.get("dp") or (parts if parts > 1 else max(1, rest)))
    if data * tensor * pipeline * context != num_gpus:
        raise ConfigError(
            "degrees", data * tensor * pipeline * context, f"their product must be the number of GPUs, {num_gpus}"
        )
    sequence = model.tokens_per_sample
    if parallelism.get("tokens_per_gpu_per_micro_batch"):
        micro_batch = max(1, int(parallelism["tokens_per_gpu_per_micro_batch"]) // sequence)
    else:
        micro_batch = int(parallelism.get("micro_batch") or 0)
    global_batch = parallelism.get("global_batch_seqs")
    accumulation = int(parallelism.get("grad_accum") or 0)
    if not micro_batch and pipeline > 1 and parallelism.get("local_batch"):
        # torchtitan cuts a replica's batch into as many parts as there are stages
        micro_batch = max(1, int(parallelism["local_batch"]) // pipeline)
    if not micro_batch and global_batch:
        # not said: one sequence where many stages or shards wait, else all at once
        micro_batch = (
            max(1, int(global_batch) // data)
            if pipeline == 1 and data == 1
            else 1
            if pipeline > 1
            else min(4, max(1, int(global_batch) // data))
        )
    if not micro_batch and not parallelism.get("max_batch") and "pure data parallel" not in text:
        raise ConfigError("micro_batch", None, "a row must say how many samples a pass holds")
    micro_batch = micro_batch or int(parallelism.get("max_batch") or 1)
    if global_batch and not accumulation:
        accumulation = max(1, round(int(global_batch) / (data * micro_batch)))
    sharding, shard = _sharding(text, data, cluster)
    is_megatron = any(word in text + str(parallelism.get("framework", "")) + str(parallelism.get("schedule", "")) for word in ("Megatron", "PTD-P", "interleaved")) or "interleave" in parallelism or "megatron" in row["file"]  # fmt: skip
    overlap = str(parallelism.get("overlap", ""))
    # interleaved, but nothing says how finely: two parts a stage; four where the stages' sends are hidden as well
    unsaid = (
        4
        if "PP" in overlap or "megatron_core" in row["file"]
        else 2
        if "interleaved" in str(parallelism.get("schedule", ""))
        else 1
    )
    chunks = int(parallelism.get("interleave") or (unsaid if pipeline > 1 else 1))
    if sharding == "none" and ("param gather" in overlap or "megatron_core" in row["file"]):
        sharding = "zero1"
    precision = precision_of(parallelism.get("precision"), cluster.gpu)
    gradient_bytes, gather_bits = _widths(text, precision, sharding, parallelism)
    if "megatron_core" in row["file"]:
        gradient_bytes = 2  # its recipes reduce in the precision they train in
    # KempnerForge moves the whole model, and with it the moments, to 16 bit, and reduces once a step (training/grad.py); it gathers the
    # logits of tensor parallel for the loss (distributed/tensor_parallel.py). nanotron fills its stages in turn (models/base.py)
    is_kempner, is_nanotron = "kempnerforge" in str(row["model"].get("name")).lower(), "nanotron" in text
    return Layout(
        filled_stages=is_nanotron, engine=_engine(text, parallelism, row), accumulates_whole=is_kempner, splits_logits=not is_kempner, optimizer_bytes=4 if is_kempner else 8,
        data=data, shard=shard, tensor=tensor, pipeline=pipeline, context=context, micro_batch=micro_batch, accumulation=max(1, accumulation),
        sharding=sharding,
        # billions of parameters on ZeRO-3 without a word about it: DeepSpeed's own examples recompute
        checkpointing=_checkpointing(parallelism.get("activation_checkpointing", "full" if sharding == "zero3" and "eepspeed" in row["file"] else None)),
        sequence_parallel=bool(parallelism.get("sequence_parallel")) or is_kempner or "torchtitan" in row["file"] or "reduce-scatter" in text or "with sequence" in text or "TP comm overlap" in overlap or "megatron_core" in row["file"],
        schedule=_schedule(f"{text} {parallelism.get('schedule', '')}".lower(), pipeline, chunks), chunks=chunks, even_stages=is_megatron, keeps_gathered=not is_megatron and not text.startswith('TP x PP'), precision=precision,
        is_mixed=precision not in ("fp32", "tf32") and not is_kempner, gradient_bytes=gradient_bytes, gather_bits=gather_bits,
        compiled=bool(parallelism.get("compile")) or "nvfuser" in str(parallelism.get("compiler")) or "torchcompile" in str(parallelism.get("compiler")),
        overlaps_tensor="TP comm overlap" in overlap or "megatron_core" in row["file"] or ("async" in text.lower() and "no async" not in text), overlaps_data=not (is_megatron and pipeline == 1 and "overlap" not in parallelism and "core" not in row["file"]),
        overlaps_gather="param gather" in overlap or "core" in row["file"],
        offloads="ffload" in text or bool(parallelism.get("cpu_offload")),
    )  # fmt: skip


def _engine(text: str, parallelism: dict[str, Any], row: dict[str, Any]) -> Engine:
    said = f"{text} {parallelism.get('framework', '')} {row['file']}".lower()
    if "deepspeed" in said:
        return "deepspeed"
    return "planned" if any(word in said for word in ("oneflow", "maxtext", "jax")) else "torch"


def precision_of(text: Any, gpu: Gpu) -> str:
    """`amp_bf16`, `apex amp`, `float8`, `fp16 mixed` in the planner's words; the GPU's usual 16 bits where nothing is said."""
    said = str(text or "").lower()
    usual = "bf16" if "bf16" in gpu.peak_tflops else "fp16"
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
    measured = row["measured"]
    derived = row.get("derived") or {}
    samples = layout.global_batch
    tokens = samples * model.tokens_per_sample
    if isinstance(measured.get("step_time_s"), int | float):
        step = float(measured["step_time_s"])
        by_rate = _from_flops(row, model, layout)
        if by_rate is not None and not 0.6 < step / by_rate < 1.6:
            raise ConfigError(
                "the row",
                f"{step:.4g} s",
                f"its own rate says {by_rate:.4g} s: batch or layers are not what is printed",
            )
        return step
    for key in ("step_time_ms", "iteration_ms"):
        if isinstance(measured.get(key), int | float):
            return float(measured[key]) / 1e3
    if measured.get("step_time_ms_iterations_8_to_12"):
        return statistics.median(value for value in measured["step_time_ms_iterations_8_to_12"] if value) / 1e3
    if measured.get("micro_step_time_s"):
        return float(measured["micro_step_time_s"]) * layout.accumulation
    if derived.get("step_time_s"):
        return float(derived["step_time_s"])
    if measured.get("tokens_per_s_per_gpu"):
        return float(tokens / (measured["tokens_per_s_per_gpu"] * layout.num_gpus))
    if measured.get("tokens_per_s"):
        return float(tokens / measured["tokens_per_s"])
    for key in ("sequences_per_s", "samples_per_s"):
        if measured.get(key):
            return float(samples / measured[key])
    return _from_flops(row, model, layout)


def _from_flops(row: dict[str, Any], model: ModelProfile, layout: Layout) -> float | None:
    measured = row["measured"]
    rate = (
        measured.get("hardware_tflops_per_gpu")
        or measured.get("tflops_per_gpu")
        or measured.get("tflops_per_gpu_digitized")
    )
    if rate is None and measured.get("total_tflops"):
        rate = measured["total_tflops"] / layout.num_gpus
    if rate is None:
        return None
    # the conventions count attention whole, whatever the mask
    full = model.forward_flops + sum(
        block.attention_flops * block.count
        for block in model.blocks
        if block.attention_flops and _is_halved(block.attention_flops, model)
    )
    passes = 4.0 if "hardware_tflops_per_gpu" in measured else 3.0
    return full * passes * layout.global_batch / (rate * 1e12 * layout.num_gpus)


def _is_halved(attention_flops: float, model: ModelProfile) -> bool:
    """Whether the profile skips the masked half."""
    layer = next(block for block in model.blocks if block.attention_flops)
    width = layer.matmuls[1].inner
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


def _sharding(text: str, data: int, cluster: Cluster) -> tuple[Sharding, int]:
    said = text.lower()
    if "hsdp" in said or "hybrid_shard" in said:
        inside = min(data, cluster.gpus_per_node)
        return "zero3", inside if data % inside == 0 else data
    if "fsdp" in said or "zero-3" in said or "zero 3" in said or "zero++" in said or "full_shard" in said:
        return "zero3", data
    if "zero-2" in said or "shard_grad_op" in said:
        return "zero2", 1
    return ("zero1", 1) if "zero-1" in said else ("none", 1)


def _widths(text: str, precision: str, sharding: Sharding, parallelism: dict[str, Any]) -> tuple[float, int]:
    """Bytes of a gradient element and bits of a parameter on the wire."""
    if "ZeRO++" in text:
        return 0.5, 4  # 4-bit gradients; 8-bit gathers, of which the backward one stays in the node
    if "1-bit" in text:
        return 2 / 16, 16
    if sharding == "zero3":
        pure = parallelism.get("fsdp_mixed_precision") == "PURE" or precision == "fp16"
        return (2 if pure else 4), (8 if precision == "fp8" else 16)
    return (4 if precision in ("fp32", "tf32", "bf16") else 2), 16
