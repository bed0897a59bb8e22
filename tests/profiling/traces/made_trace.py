"""Traces as Kineto writes them, made of a few events with known answers. Times are microseconds."""

import gzip
import io
import itertools
import json

from scaleray.profiling.traces.trace import Trace, read_trace

BASE_NS = 1_700_000_000_000_000_000


class MadeTrace:
    """One rank's trace. A kernel is launched by a call of 2 us at `launched`."""

    def __init__(self, rank=0, world_size=2, backend="nccl", torch="2.13.0", clock_ahead_us=0, **own):
        self.events, self.number, self.ahead = [], 0, clock_ahead_us
        self.values = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": backend, "rank": rank, "world_size": world_size},
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}] if backend == "nccl" else [],
            "baseTimeNanoseconds": BASE_NS,
            "scaleray": {"torch": torch, **own},
        }

    def event(self, category, name, start, duration, *, thread=1, process=4000, **args):
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": process,
                "tid": thread,
                "ts": start + self.ahead,
                "dur": duration,
                "args": args,
            }
        )
        return self

    def steps(self, *bounds, first=7):
        for number, (start, end) in enumerate(itertools.pairwise(bounds), start=first):
            self.event("user_annotation", f"ProfilerStep#{number}", start, end - start)
        return self

    def kernel(self, name, start, duration, *, launched, stream=7, category="kernel", external=0, **args):
        self.number += 1
        self.event("cuda_runtime", "cudaLaunchKernel", launched, 2, correlation=self.number)
        args |= {"stream": stream, "correlation": self.number, "External id": external}
        return self.event(category, name, start, duration, thread=stream, process=0, **args)

    def all_reduce(self, start, duration, *, launched, sequence=None, **args):
        args |= {"Collective name": "allreduce", "In msg nelems": 1000, "dtype": "BFloat16"}
        args |= {"Group size": 2, "Process Group Name": "0"} | ({"Seq": sequence} if sequence is not None else {})
        name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        return self.kernel(name, start, duration, launched=launched, stream=20, **args)

    def operator(self, name, start, duration, *, thread=1, **args):
        return self.event("cpu_op", name, start, duration, thread=thread, **args)

    def text(self):
        return json.dumps({**self.values, "traceEvents": self.events, "traceName": "made.json"}, indent=2)

    def file(self):
        return io.BytesIO(self.text().encode())

    def read(self) -> Trace:
        return read_trace(self.file(), f"rank{self.values['distributedInfo']['rank']}.json")

    def write(self, path):
        path.write_bytes(gzip.compress(self.text().encode()))
        return path


def gpu_step(rank=0, **changes):
    """One step of 1000 us: compute 0-400 and 500-700, an all-reduce 300-600 and 650-800, a copy 790-850, then the
    host's pause from 850; the pause 20-50 of the first stream is filled by nothing else."""
    trace = MadeTrace(rank, **changes).steps(0, 1000)
    trace.kernel("gemm", 20, 380, launched=0)
    trace.all_reduce(300, 300, launched=10, sequence=5)
    trace.kernel("gemm", 500, 200, launched=20)
    trace.all_reduce(650, 150, launched=30, sequence=6)
    trace.kernel("Memcpy DtoH (Device -> Pinned)", 790, 60, launched=40, category="gpu_memcpy")
    trace.kernel("relu", 860, 40, launched=50)
    return trace.kernel("relu", 950, 50, launched=920)


def gloo_step(rank=0, **changes):
    """One step of 1000 us on the CPU: operators 100-500 and 600-700, gloo's all-reduce 400-650 on its own thread."""
    trace = MadeTrace(rank, backend="gloo", **changes).steps(0, 1000)
    trace.operator("aten::linear", 100, 200).operator("aten::addmm", 150, 100)
    trace.operator("autograd::engine::evaluate_function: AddmmBackward0", 300, 200)
    trace.operator("aten::add_", 600, 100)
    shapes = {"Input Dims": [[49536]], "Input type": ["float"]}
    return trace.event("user_annotation", "gloo:all_reduce", 400, 250, thread=9, **shapes)
