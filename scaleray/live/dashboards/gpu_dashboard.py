"""GPU panels of the dashboard Cluster, which need the exporter of NVIDIA's DCGM."""

from scaleray.live import foreign as of
from scaleray.live.dashboards.panels import Panel, Query, Row, Threshold
from scaleray.live.dashboards.queries import foreign, foreign_per_second

GPU = ("Hostname", "gpu")
OF_GPU = "GPU {{gpu}} of {{Hostname}}"


def of_gpu(metric: of.ForeignMetric) -> str:
    """A query with one series per GPU, regardless of pods and containers in the exporter's labels."""
    return f"max by ({', '.join(GPU)}) ({foreign(metric)})"


GPUS = Row(
    "GPUs (DCGM)",
    (
        Panel(
            title="GPU activity",
            description="Share of time that a GPU's engine was active. Normal while training: above 0.9. Near 0 on an "
            "allocated GPU, the run is idle or hangs. This is not efficiency: a single small kernel counts as busy.",
            queries=(Query(of_gpu(of.GPU_ENGINE_ACTIVE), OF_GPU),),
            unit="percentunit",
            needs="GPU",
            minimum=0,
            maximum=1,
        ),
        Panel(
            title="Tensor cores busy",
            description="Normal for large models in bf16: 0.3 to 0.6. A low value on a busy GPU means fp32 arithmetic, "
            "small matrices, or waiting for memory.",
            queries=(Query(of_gpu(of.GPU_TENSOR_ACTIVE), OF_GPU),),
            unit="percentunit",
            needs="GPU",
            minimum=0,
            maximum=1,
        ),
        Panel(
            title="Multiprocessors busy",
            description="Share of cycles in which a multiprocessor has work. Normal: above 0.7. Off in the exporter by "
            "default; dashboards/dcgm_counters.csv enables it.",
            queries=(Query(of_gpu(of.GPU_SM_ACTIVE), OF_GPU),),
            unit="percentunit",
            needs="GPU",
            minimum=0,
            maximum=1,
        ),
        Panel(
            title="GPU memory interface busy",
            description="Normal: below 0.8. Near 1 with idle tensor cores, memory limits the model: compile it to fuse "
            "kernels, or use larger matrices.",
            queries=(Query(of_gpu(of.GPU_DRAM_ACTIVE), OF_GPU),),
            unit="percentunit",
            needs="GPU",
            minimum=0,
            maximum=1,
        ),
        Panel(
            title="GPU memory in use",
            description="Normal: constant, and below 0.95 of the device. If it creeps up, see Memory of the fullest "
            "rank on the dashboard Run.",
            queries=(
                Query(
                    f"{of_gpu(of.GPU_MEMORY_USED)} / ({of_gpu(of.GPU_MEMORY_USED)} + {of_gpu(of.GPU_MEMORY_FREE)})",
                    OF_GPU,
                ),
            ),
            unit="percentunit",
            needs="GPU",
            minimum=0,
            maximum=1,
        ),
        Panel(
            title="GPU power",
            description="Normal while training: near the limit of the device, and similar on all GPUs. A GPU that "
            "draws less is throttled, idle or late.",
            queries=(Query(of_gpu(of.GPU_POWER), OF_GPU),),
            unit="watt",
            needs="GPU",
            minimum=0,
        ),
        Panel(
            title="GPU temperature",
            description="Normal: below 80 °C. Above that, the clock falls: check fans, air flow and neighbours.",
            queries=(Query(of_gpu(of.GPU_TEMPERATURE), OF_GPU),),
            unit="celsius",
            needs="GPU",
            thresholds=(Threshold(80, "orange"), Threshold(87, "red")),
        ),
        Panel(
            title="GPU clock",
            description="Multiprocessor clock. Normal: equal on all GPUs of one kind. A GPU with a lower clock is "
            "throttled.",
            queries=(Query(f"{of_gpu(of.GPU_CLOCK)} * 1e6", OF_GPU),),
            unit="hertz",
            needs="GPU",
            minimum=0,
        ),
        Panel(
            title="GPU throttling",
            description="Share of time that a GPU was slowed down, by reason. Normal: 0, or power only. For thermal "
            "reasons, check the cooling; for others, ask the machine's owner. Off in the exporter by default; "
            "dashboards/dcgm_counters.csv enables it.",
            queries=tuple(
                Query(
                    f"{foreign_per_second(metric, *GPU)} / {of.NANOSECONDS:g}",
                    f"{metric.name.removeprefix('DCGM_FI_DEV_').removesuffix('_VIOLATION').lower()}, {OF_GPU}",
                )
                for metric in of.GPU_THROTTLED
            ),
            unit="percentunit",
            needs="GPU",
            minimum=0,
        ),
        Panel(
            title="NVLink",
            description="Growth of the counter of all lanes. Normal: similar on all GPUs of a node while training.",
            queries=(Query(foreign_per_second(of.GPU_NVLINK, *GPU), OF_GPU),),
            unit="none",
            needs="GPU",
            minimum=0,
        ),
        Panel(
            title="PCIe",
            description="Normal: low while training. If it is high, batches or offloaded parameters are copied to the "
            "device all the time.",
            queries=(
                Query(of_gpu(of.GPU_SENT), f"sent by {OF_GPU}"),
                Query(of_gpu(of.GPU_RECEIVED), f"received by {OF_GPU}"),
            ),
            unit="Bps",
            needs="GPU",
            minimum=0,
        ),
        Panel(
            title="GPU errors",
            description="Number of the last Xid, and the rates of uncorrectable ECC errors, remapped rows, PCIe "
            "retries and NVLink errors. Normal: 0. For anything else, drain the node and look up the Xid.",
            queries=(
                Query(of_gpu(of.GPU_XID), f"Xid of {OF_GPU}"),
                Query(of_gpu(of.GPU_REMAP_FAILURE), f"rows not remapped of {OF_GPU}"),
                *(
                    Query(foreign_per_second(metric, *GPU), f"{words} of {OF_GPU}")
                    for metric, words in (
                        (of.GPU_ECC_DOUBLE_BIT, "ECC errors"),
                        (of.GPU_REMAPPED_ROWS, "rows remapped"),
                        (of.GPU_PCIE_REPLAYS, "PCIe retries"),
                        *(
                            (error, error.help.removeprefix("Total number of ").rstrip("."))
                            for error in of.GPU_LINK_ERRORS
                        ),
                    )
                ),
            ),
            unit="none",
            needs="GPU",
            minimum=0,
        ),
    ),
)
