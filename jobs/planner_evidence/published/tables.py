"""Tables of throughput under data parallelism, whose rows hold a figure for each precision, framework or network."""

from __future__ import annotations

import re
from typing import Any

from jobs.planner_evidence.published.machines import cluster_of, system_of
from jobs.planner_evidence.published.networks import samples_per_unit, trained_model
from jobs.planner_evidence.published.observation import Observation
from jobs.planner_evidence.published.recipes import precision_of
from scaleray.errors import ConfigError
from scaleray.planner.cost.layout import Layout


def _data_parallel(
    row: dict[str, Any],
    *,
    name: str,
    num_gpus: int,
    batch: float,
    accumulation: int,
    precision: str,
    per_s: float,
    label: tuple[str, ...],
    hardware: dict[str, Any],
) -> Observation:
    model = trained_model(name, row["model"])
    cluster = cluster_of(hardware | {"gpus": num_gpus})
    micro_batch = max(1, round(batch))
    layout = Layout(
        data=num_gpus,
        channels_last=True,
        micro_batch=micro_batch,
        accumulation=accumulation,
        precision=precision_of(precision, cluster.gpu),
        gradient_bytes=4,
        is_mixed=precision not in ("fp32", "tf32"),
        optimizer_bytes=4 if model.kind == "cnn" else 8,
    )
    return Observation(
        source=row["file"],
        family=row["family"],
        row=str(row.get("id", "")),
        series=(row["file"], name, cluster.gpu.name, precision, *label),
        model=model,
        layout=layout,
        cluster=cluster,
        fused_attention=False,
        step_time_s=num_gpus * batch * accumulation / per_s,
        is_digitised=bool(row.get("digitised")),
    )


def example_points(row: dict[str, Any]) -> list[Observation]:
    """A row of NVIDIA's DeepLearningExamples: a throughput for each precision."""
    measured = {key.lower(): value for key, value in row["measured"].items()}
    hardware, node_size = system_of(row["hardware"]["system"])
    gpus = next((measured[key] for key in ("gpus", "number of gpus") if key in measured), None)
    num_gpus = int(gpus) if gpus is not None else int(measured["nodes"]) * node_size
    batch_text = next((value for key, value in measured.items() if "batch" in key and "gpu" in key), None)
    accumulation = int(measured.get("grad accumulation") or 1)
    found = []
    for key, value in measured.items():
        if not key.startswith(("throughput - ", "number of ")) or "gpu" in key:
            continue
        if not isinstance(value, int | float):
            continue
        precision = "tf32" if "tf32" in key else "fp32" if "fp32" in key else "amp"
        samples = _batch_of(batch_text, precision, row["model"]["name"])
        units = samples_per_unit(row["model"]["name"], key)
        found.append(
            _data_parallel(
                row,
                name=row["model"]["name"],
                num_gpus=num_gpus,
                batch=samples,
                accumulation=accumulation,
                precision=precision,
                per_s=float(value) * units,
                hardware=hardware,
                label=(
                    str(row["parallelism"].get("framework")),
                    row["hardware"]["system"],
                    str(measured.get("dataset", "")),
                    _fixed(row, key, batch_text),
                ),
            )
        )
    if not found:
        raise ConfigError("the row", "no throughput", "a figure is needed for at least one precision")
    return found


def _fixed(row: dict[str, Any], key: str, batch_text: Any) -> str:
    """What tells apart the curves of one table: its batch where rows keep it (weak scaling), the unit measured."""
    is_strong = any("strong" in name.lower() for name in row["measured"])
    unit = key.split(" used")[0].removeprefix("number of ") if key.startswith("number of ") else ""
    return unit + ("strong" if is_strong else f"batch {batch_text}")


def _batch_of(text: Any, precision: str, name: str) -> float:
    """Samples of a GPU and pass, from `128`, `104@FP16, 48@FP32` or `10240/5120` (mixed first)."""
    if text is None:
        # the scripts of those tables: 256 in mixed precision, 128 otherwise; SE-ResNeXt and ResNeXt half of it
        return (256 if precision != "fp32" else 128) / (2 if "ResNeXt" in name else 1)
    parts = [part.strip() for part in str(text).replace("/", ",").replace(" and ", ",").split(",")]
    chosen = parts[0] if precision == "amp" or len(parts) == 1 else parts[-1]
    return float(chosen.split("@")[0])


def framework_points(row: dict[str, Any]) -> list[Observation]:
    """A row of DLPerf: a throughput in samples a second for each framework."""
    measured, setting = row["measured"], row["parallelism"]["setting"]
    batch = float(setting.split("batch size")[1].strip(" =").split()[0])
    precision = "fp32" if "FP32" in setting else "amp"
    return [
        _data_parallel(
            row,
            name=row["model"]["name"],
            num_gpus=int(measured["device num"]),
            batch=batch,
            accumulation=1,
            precision=precision,
            per_s=float(value),
            label=(framework, setting),
            hardware=row["hardware"],
        )
        for framework, value in measured.items()
        if framework not in ("device num", "node num") and isinstance(value, int | float)
    ]


def network_points(row: dict[str, Any]) -> list[Observation]:
    """A row of TensorFlow's 2017 benchmarks: images a second for each network, in fp32."""
    batches = {"Alexnet": 512, "VGG16": 64, "ResNet-152": 64, "ResNet-50": 64, "InceptionV3": 64}
    measured = row["measured"]
    said = re.search(r"batch (\d+)", str(row.get("table", "")))
    if said:
        batches = {name: int(said[1]) for name in batches} | {"Alexnet": 512}
    return [
        _data_parallel(
            row,
            name=name,
            num_gpus=int(measured["GPUs"]),
            batch=batches.get(name, 64),
            accumulation=1,
            precision="fp32",
            per_s=float(value),
            label=(str(row.get("table", "")),),
            hardware=row["hardware"],
        )
        for name, value in measured.items()
        if name != "GPUs" and isinstance(value, int | float)
    ]
