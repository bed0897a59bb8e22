"""Which operators and modules the time went to, and what they computed."""

import json

import pytest
import torch
from made_trace import MadeTrace
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import flop_counter

from scaleray.profiling.traces.host import host_of
from scaleray.profiling.traces.partition import marked_steps
from scaleray.profiling.traces.time_shares import (
    flops_of,
    precision_of,
    top_kernels,
    top_modules,
    top_operators,
    total_flops,
)
from scaleray.profiling.traces.trace import read_trace


def shares_of(made, **options):
    trace = made.read()
    steps, host = marked_steps(trace), host_of(trace)
    return top_operators(trace, host, steps), top_kernels(trace, steps), top_modules(trace, host, steps, **options)


def made_step():
    """A block whose forward pass is 100-200 on thread 1 and whose backward is 500-600 on thread 2, and a head."""
    shapes = {"Input Dims": [[8], [4, 16], [16, 8], [], []], "Input type": ["c10::BFloat16"] * 3 + ["Scalar"] * 2}
    trace = MadeTrace().steps(0, 1000)
    trace.event("user_annotation", "module: blocks.0", 100, 100)
    trace.operator("aten::linear", 110, 80, **{"Sequence number": 4})
    trace.operator("aten::addmm", 120, 60, **{"Sequence number": 5}, **shapes)
    trace.kernel("gemm", 200, 300, launched=150)
    trace.event("user_annotation", "module: head", 200, 50)
    trace.operator("aten::linear", 205, 40, **{"Sequence number": 6})
    trace.kernel("gemm_small", 510, 50, launched=220)
    backward = "autograd::engine::evaluate_function: AddmmBackward0"
    trace.operator(backward, 500, 100, thread=2, **{"Sequence number": 5})
    trace.operator(
        "aten::mm", 510, 40, thread=2, **{"Input Dims": [[16, 4], [4, 8]], "Input type": ["c10::BFloat16"] * 2}
    )
    trace.event("cuda_runtime", "cudaLaunchKernel", 520, 2, thread=2, correlation=99)
    trace.event("kernel", "gemm_back", 600, 200, process=0, thread=7, stream=7, correlation=99)
    return trace


def test_an_operator_has_its_own_time_and_the_kernels_that_it_launched():
    operators, kernels, _ = shares_of(made_step())
    found = {each.name: (each.count, each.host_ns, each.device_ns) for each in operators}
    assert found == {
        "aten::addmm": (1, 60_000, 300_000),
        "aten::mm": (1, 40_000, 200_000),
        "aten::linear": (2, 20_000 + 40_000, 50_000),  # without the addmm within it
    }
    assert [(each.name, each.device_ns, each.host_ns) for each in kernels] == [
        ("gemm", 300_000, None),
        ("gemm_back", 200_000, None),
        ("gemm_small", 50_000, None),
    ]


def test_a_module_has_its_backward_pass_from_another_thread_by_the_sequence_number():
    *_, modules = shares_of(made_step(), peak_flops=1e9)
    assert [(each.name, each.compute_ns) for each in modules] == [("blocks.0", 500_000), ("head", 50_000)]
    flops = 2 * 4 * 16 * 8 * 2
    assert modules[0].flops == flops and modules[0].mfu == pytest.approx(flops / (500e-6 * 1e9))
    assert modules[1].flops == 0 and modules[1].mfu is None
    assert precision_of(made_step().read()) == "bf16"


def test_without_shapes_there_are_no_flops_rather_than_none_at_all():
    trace = MadeTrace().steps(0, 100).event("user_annotation", "module: a", 0, 50).operator("aten::mm", 10, 20)
    trace.kernel("gemm", 20, 30, launched=15)
    *_, (module,) = shares_of(trace)
    assert module.flops is None and module.mfu is None
    assert total_flops(trace.read(), marked_steps(trace.read())) is None and precision_of(trace.read()) is None


def test_modules_of_traces_with_stacks_are_those_that_torch_names():
    trace = MadeTrace(backend="gloo").steps(0, 100).event("python_function", "nn.Module: Linear_0", 10, 50)
    trace.operator("aten::mm", 20, 30)
    *_, (module,) = shares_of(trace)
    assert (module.name, module.compute_ns) == ("Linear_0", 30_000)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, images):
        with record_function("module: convolutions"):
            rows = self.up(self.convolution(images)).flatten(2).reshape(len(images), -1, 16)
        with record_function("module: attention"):
            rows = rows + nn.functional.scaled_dot_product_attention(
                *[rows.unflatten(2, (2, 8)).transpose(1, 2)] * 3
            ).transpose(1, 2).flatten(2)
        with record_function("module: head"):
            return self.head(rows)


def test_operations_of_a_real_trace_are_those_of_torchs_own_counter(tmp_path):
    """Convolutions, transposed ones, attention and matrix products, forward and backward. Of attention on the CPU the
    counter knows nothing by itself; it is given its own formulas for the GPU's."""
    torch.manual_seed(0)
    net, images = Net(), torch.randn(2, 3, 8, 8)

    def step():
        net(images).square().sum().backward()

    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    formulas = {
        attention: lambda *shapes, **_: flop_counter.sdpa_flop_count(*shapes[:3]),
        backward: lambda *shapes, **_: flop_counter.sdpa_backward_flop_count(*shapes[:4]),
    }
    with flop_counter.FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler, record_function("ProfilerStep#0"):
        step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    with (tmp_path / "trace.json").open("rb") as file:
        trace = read_trace(file, "trace.json")
    steps = marked_steps(trace)
    assert total_flops(trace, steps) == counter.get_total_flops()
    modules = {each.name: each.flops for each in top_modules(trace, host_of(trace), steps)}
    assert sum(modules.values()) == counter.get_total_flops() and all(modules.values())
    assert modules["head"] == 3 * (2 * 32 * 16 * 5)  # forward, and two products backward


def test_a_convolution_with_groups_has_as_many_operations_in_each_of_its_gradients():
    """torch's counter has `groups` times as many in the gradient of the weights."""
    shapes, values = (
        [[2, 6, 4, 4], [2, 3, 8, 8], [6, 1, 3, 3]],
        ["", "", "", "[6]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "3"],
    )
    forward = {"Input Dims": [shapes[1], shapes[2], [6]], "Concrete Inputs": ["", "", "", *values[4:]]}
    assert flops_of("aten::convolution", forward) == 2 * 2 * (4 * 4) * 6 * (3 // 3) * (3 * 3)
    for mask, gradients in (("[True, True, True]", 2), ("[False, True, False]", 1)):
        backward = {"Input Dims": shapes, "Concrete Inputs": [*values, mask]}
        assert flops_of("aten::convolution_backward", backward) == gradients * flops_of("aten::convolution", forward)


def test_shapes_that_fit_no_formula_count_nothing():
    assert flops_of("aten::mm", {"Input Dims": [[3]]}) == 0
    assert flops_of("aten::convolution", {"Input Dims": [[1, 1, 4], [1, 1, 2]]}) == 0
    assert flops_of("aten::add", json.loads('{"Input Dims": [[2], [2]]}')) == 0
