"""A stand-in for NVIDIA's DCGM exporter, for machines without GPUs: four made-up GPUs on a page of its format.

It shows names, kinds and labels as dcgm-exporter does, so that rules and dashboards can be tried against a Prometheus that
scrapes it. What a real GPU would show when it throttles or fails is not shown by it.
"""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections.abc import Iterator

from scaleray.live.foreign import GPU_ECC_DOUBLE_BIT, GPU_ENGINE_ACTIVE, GPU_THROTTLED, GPU_XID, NANOSECONDS, OF_GPUS

GPUS = 4
USUAL = {"DCGM_FI_DEV_FB_USED": 61440.0, "DCGM_FI_DEV_FB_FREE": 20480.0, "DCGM_FI_DEV_POWER_USAGE": 512.0}
BUSY, IDLE, THROTTLED, FALLEN_OFF = 0.9, 0.02, 0.5, 79.0
"""Share of time that a GPU is busy, or is not; that it is slowed down; and the Xid of one that has fallen off the bus."""
FAULTS = {"gpu_idle": 0, "gpu_throttled": 1, "gpu_ecc": 2, "gpu_xid": 3}
"""The rules that the faults are for, each with the GPU that has it."""


class StandInGpus:
    """Values of the made-up GPUs, which have a fault from the time on that it is planted."""

    def __init__(self) -> None:
        self.begun = time.time()
        self.planted: dict[str, float] = {}

    def plant(self, rule: str) -> None:
        """Begin a fault now."""
        self.planted[rule] = time.time()

    def value(self, name: str, gpu: int) -> float:
        """What a field of a GPU is now. Counters grow, as those of a GPU at work do."""
        since = {rule: time.time() - at for rule, at in self.planted.items() if FAULTS[rule] == gpu}
        if name == GPU_ENGINE_ACTIVE.name:
            return IDLE if "gpu_idle" in since else BUSY
        if name == GPU_THROTTLED[1].name:
            return THROTTLED * NANOSECONDS * since.get("gpu_throttled", 0.0)
        if name == GPU_ECC_DOUBLE_BIT.name:
            return float("gpu_ecc" in since)
        if name == GPU_XID.name:
            return FALLEN_OFF if "gpu_xid" in since else 0.0
        return USUAL.get(name, 0.0)

    def page(self) -> str:
        """All fields of all GPUs, in the text format of Prometheus."""
        lines = []
        for metric in OF_GPUS:
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
            for gpu in range(GPUS):
                labels = {
                    "gpu": str(gpu),
                    "UUID": f"GPU-00000000-0000-0000-0000-00000000000{gpu}",
                    "pci_bus_id": f"00000000:0{gpu}:00.0",
                    "device": f"nvidia{gpu}",
                    "modelName": "stand-in",
                    "Hostname": "stand-in",
                }
                inner = ",".join(f'{key}="{value}"' for key, value in labels.items())
                lines.append(f"{metric.name}{{{inner}}} {self.value(metric.name, gpu)!r}")
        return "\n".join((*lines, ""))


@contextlib.contextmanager
def exporting(gpus: StandInGpus) -> Iterator[int]:
    """The port of 127.0.0.1 on which the GPUs' page is, for as long as the context lasts."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = gpus.page().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *about: object) -> None:
            """Say nothing of questions."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
