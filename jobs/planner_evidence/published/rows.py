"""A folder of published measurements as questions with known answers: (model, layout, cluster) and step time or memory.

The format: each JSON file is a source with `records` and `tables`; a table's row inherits the table's other fields. One
row can hold several measurements (a column for each precision or framework). What cannot be asked is returned as
`Skipped` with the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jobs.planner_evidence.published.fields import number, part, whole
from jobs.planner_evidence.published.machines import cluster_of, placed_cluster
from jobs.planner_evidence.published.networks import fused_attention, model_of, with_attention_kernel
from jobs.planner_evidence.published.observation import MemoryKind, Observation
from jobs.planner_evidence.published.recipes import layout_of, precision_of, step_time_of
from jobs.planner_evidence.published.tables import example_points, framework_points, network_points
from scaleray.common.parsing import load_json
from scaleray.errors import ConfigError, DataError, ScaleRayError
from scaleray.planner.cost.layout import Layout

# host time in seconds for each tensor of the parameters, the same on T4, A100 and Quadro: intercepts of step time over
# batch in both traces
ADAPTDL_TENSOR_S, LOOP_TENSOR_S, CAST_TENSOR_S = 0.35e-3, 0.30e-3, 0.35e-3
# a lone replica has nobody to compare gradients with and takes the step before instead: ten small kernels more for each
# tensor, after a synchronisation (adaptdl's gradient_noise_scale.py). It is why Sia's A100 are faster in pairs than
# alone
ALONE_TENSOR_S = 10 * 8e-6
NOT_SPEED = {
    "convergence": "is about accuracy, not speed or memory",
    "hardware": "is a data sheet, which the catalogue holds",
    "collectives": "times a collective, not a step",
}
BATCH_KEYS = ("micro_batch", "tokens_per_gpu_per_micro_batch", "global_batch_seqs", "local_batch", "max_batch")
MEMORY_UNSAID = "the batch, what the optimizer keeps or how the loss is cut is not said"


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be judged, and why."""

    source: str
    family: str
    row: str
    reason: str


def read_folder(folder: Path) -> list[dict[str, Any]]:
    """Every row of every file, flat.

    Raises DataError for a folder without files, or a file that is not in the format.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise DataError(
            "data folder",
            str(folder),
            "it must hold JSON files of published measurements",
            "see jobs/planner_evidence/published/rows.py",
        )
    found: list[dict[str, Any]] = []
    for path in paths:
        try:
            source = load_json(path.read_text())
            defaults = source.get("defaults") or {}
            if not {"records", "tables"} & set(source):
                raise KeyError("records")
            rows = [
                defaults | record if isinstance(record, dict) else {"is_no_mapping": True, "id": f"record {index}"}
                for index, record in enumerate(source.get("records") or ())
            ]
            for table in source.get("tables") or ():
                shared = {key: value for key, value in table.items() if key not in ("columns", "rows")}
                for index, row in enumerate(table["rows"]):
                    fits = len(row) == len(table["columns"])
                    cells = {"measured": dict(zip(table["columns"], row, strict=True))} if fits else {"is_ragged": True}
                    rows.append(defaults | shared | cells | {"id": f"{table['table']}:{index}"})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise DataError(
                f"data file {path.name}", type(exc).__name__, f"it must hold source, records and tables: {exc}"
            ) from exc
        found += [row | {"file": path.stem} for row in rows]
    return found


def observations(rows: list[dict[str, Any]]) -> tuple[list[Observation], list[Skipped]]:
    """What can be asked, and what cannot with the reason. Every row is in one of the two lists at least once."""
    asked: list[Observation] = []
    skipped: list[Skipped] = []
    for row in rows:
        name = str(row.get("id", ""))
        try:
            found = [_checked(one) for one in _read(row)]
        except ScaleRayError as exc:
            skipped.append(Skipped(row["file"], str(row.get("family")), name, str(exc).split("\n")[0]))
        # rows come from anywhere, and one that nobody thought of must not cost the others their judgement
        except Exception as exc:
            reason = f"cannot be read: {type(exc).__name__} {exc}".split("\n")[0]
            skipped.append(Skipped(row["file"], str(row.get("family")), name, reason))
        else:
            asked += found
            if _memory_of(row.get("measured", {}))[0] and not any(one.memory_bytes for one in found):
                skipped.append(
                    Skipped(row["file"], str(row.get("family")), name, f"its memory is not judged: {MEMORY_UNSAID}")
                )
    return asked, skipped


def _read(row: dict[str, Any]) -> list[Observation]:
    if row.get("is_no_mapping"):
        raise ConfigError("the row", "no mapping", "it must hold fields with values")
    if row.get("is_ragged"):
        raise ConfigError("the row", "ragged", "it must have a cell for each column of its table")
    if str(row["family"]) in NOT_SPEED:
        raise ConfigError("the row", row["family"], f"it {NOT_SPEED[str(row['family'])]}")
    if not row.get("verified", True) and not row.get("verified_secondary"):
        raise ConfigError("the row", "unverified", "only figures that were read in a source are used")
    measured = part(row, "measured")
    if "placement" in measured:
        return [_trace_point(row)]
    if "system" in part(row, "hardware"):
        return example_points(row)
    if "device num" in measured:
        return framework_points(row)
    if "GPUs" in measured:
        return network_points(row)
    return [_point(row)]


def _point(row: dict[str, Any]) -> Observation:
    measured, parallelism, hardware, shape = (
        part(row, name) for name in ("measured", "parallelism", "hardware", "model")
    )
    model = model_of(shape, row)
    degrees = [whole(parallelism, key) or 1 for key in ("dp", "tp", "pp", "cp")]
    is_said = any(hardware.get(key) for key in ("gpus", "num_gpus", "chips", "nodes"))
    cluster = cluster_of(hardware, num_gpus=None if is_said else math.prod(degrees))
    cluster = replace(cluster, gpu=with_attention_kernel(cluster.gpu, row))
    layout = layout_of(parallelism, model, cluster, row)
    memory, kind = _memory_of(measured)
    step = step_time_of(row, model, layout)
    failed = bool(measured.get("out_of_memory") or measured.get("oom"))
    if step is None and memory is None and not failed:
        raise ConfigError(
            "the row", ", ".join(measured), "it holds neither a step's time nor memory that can be compared"
        )
    strategy = str(parallelism.get("strategy", ""))
    if any(word in strategy for word in ("LoRA", "RL", "SFT", "finetune")):
        memory = None  # what its optimizer keeps and how its loss is cut is not said
        if step is None:
            raise ConfigError(
                "the row", strategy, "its memory cannot be compared: optimizer state and loss are not described"
            )
    if not any(parallelism.get(key) for key in BATCH_KEYS):
        memory = None
    series = (
        row["file"],
        "LoRA" if "LoRA" in strategy else "",
        str(shape.get("name")),
        cluster.gpu.name,
        str(shape.get("seq_len")),
        layout.precision,
        str(parallelism.get("framework", "")),
        str(parallelism.get("compiler", "")) + str(parallelism.get("compile", "")),
        str(shape.get("hidden")) + "x" + str(shape.get("heads")),
    )
    return Observation(
        source=row["file"],
        family=str(row["family"]),
        row=str(row.get("id", "")),
        series=tuple(str(one) for one in series),
        model=model,
        layout=layout,
        cluster=cluster,
        fused_attention=fused_attention(row, cluster.gpu),
        step_time_s=step,
        memory_bytes=memory,
        memory_kind=kind,
        out_of_memory=failed,
        is_digitised=bool(row.get("digitised")),
    )


def _trace_point(row: dict[str, Any]) -> Observation:
    measured = row["measured"]
    model = model_of(row["model"], row)
    cluster = placed_cluster(row["hardware"], str(measured["placement"]))
    precision = precision_of(row["model"].get("precision"), cluster.gpu)
    optimizer = str(row["model"].get("optimizer", ""))
    # adaptdl measured both traces, with statistics of every gradient; AdamW was a loop over tensors then, and apex
    # casts each of them
    tensor_s = ADAPTDL_TENSOR_S + (LOOP_TENSOR_S if optimizer == "AdamW" else 0.0)
    tensor_s += CAST_TENSOR_S if "amp" in str(row["model"].get("precision")) else 0.0
    tensor_s += ALONE_TENSOR_S if int(measured["num_replicas"]) == 1 else 0.0
    layout = Layout(
        data=int(measured["num_replicas"]),
        extra_s=tensor_s * model.num_tensors,
        micro_batch=int(measured["local_bsz"]),
        precision=precision,
        gradient_bytes=4,
        is_mixed=precision in ("fp16", "bf16"),
        optimizer_bytes=8 if optimizer == "AdamW" else 4,
    )
    series = (row["file"], row["model"]["name"], cluster.gpu.name, precision)
    return Observation(
        source=row["file"],
        family=row["family"],
        row=str(row.get("id", "")),
        series=tuple(str(one) for one in series),
        model=model,
        layout=layout,
        cluster=cluster,
        fused_attention=False,
        step_time_s=float(measured["step_time_s"]),
        is_trace=True,
    )


def _memory_of(measured: dict[str, Any]) -> tuple[float | None, MemoryKind]:
    # torch's counters are divided by 1024**3 whatever the unit is called; of nvidia-smi's MiB the last three digits are
    # left out
    units: list[tuple[str, float, MemoryKind]] = [
        ("peak_allocated_mib", 2.0**20, "allocated"),
        ("peak_memory_gib", 2.0**30, "allocated"),
        ("peak_memory_active_gib", 2.0**30, "allocated"),
        ("memory_gib_per_gpu", 2.0**30, "reserved"),
        ("peak_reserved_mib", 2.0**20, "reserved"),
        ("memory_gb_per_gpu", 2.0**30, "allocated"),
        ("memory_gb", 1000 * 2.0**20, "device"),
        ("memory_mib_nvidia_smi", 2.0**20, "device"),
    ]
    for key, unit, kind in units:
        found = number(measured, key)
        if found is not None:
            return found * unit, kind
    return None, "allocated"


def _checked(one: Observation) -> Observation:
    """The observation, checked.

    Raises ConfigError for what no run can have been: times and sizes that are not finite, more GPUs or samples than
    there are.
    """
    limits = {
        "step time in s": (one.step_time_s, 1e6),
        "memory in bytes": (one.memory_bytes, 1e14),
        "GPUs": (one.num_gpus, 1e6),
        "pipeline stages": (one.layout.pipeline, max(1, one.model.num_layers) * 4),
        "samples of a step": (one.layout.global_batch, 1e9),
        "chunks of a stage": (one.layout.chunks, 4096),
        "parameters": (one.model.num_params, 1e15),
    }
    for what, (value, most) in limits.items():
        if value is not None and not (math.isfinite(value) and 0 < value <= most):
            raise ConfigError(f"the row's {what}", value, f"it must be above 0 and at most {most:.3g}")
    return one
