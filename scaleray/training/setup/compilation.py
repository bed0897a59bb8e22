"""Compilation by torch.compile inside the strategy's wrapper, with a report of its result.

A compiled model that DDP or FSDP has wrapped silently runs eagerly (pytorch#140416), and so does FSDP around a block on
which `compile()` was called, because hooks are compiled with it. Here only the forward method is compiled, so that
every hook stays outside and all blocks of a class share one graph. Graphs, graph breaks and failures are counted, since
neither torch nor a loss curve shows that a run was not compiled. Source: Ansel et al. 2024, PyTorch 2, ASPLOS,
doi:10.1145/3620665.3640366."""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from scaleray.common.own_folder import COMPILED
from scaleray.config import RunConfig
from scaleray.errors import ConfigError
from scaleray.training.setup.blocks import Forward, forward_of, model_blocks, replace_forward

MEND = "fix this cause, or leave the setting out to train without compilation"
DDP_SPLITS_FROM_MIB = 1.0  # torch's DDP optimizer asserts that buckets are no smaller than DDP's first one


@dataclass(frozen=True)
class Compilation:
    """Model that is to be compiled. `report` is empty until steps have run, since compilation happens on demand."""

    what: str
    backend: str
    must_succeed: bool
    notes: list[str] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """Result of the compilation on this rank: graphs and their operations, breaks and failures with file and line,
        cache hits."""
        from torch._dynamo.utils import counters

        stats, inductor = counters["stats"], counters["inductor"]
        return {
            "what": self.what,
            "backend": self.backend,
            "is_compiled": stats["unique_graphs"] > 0,
            "graphs": stats["unique_graphs"],
            "operations": stats["calls_captured"],
            "graph_breaks": _graph_breaks(),
            "failures": _failures(),
            "cache_hits": inductor["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
            "compile_time_s": round(_compile_time_s(), 3),
        }

    def check(self) -> list[str]:
        """Warnings after the first steps. Raises ConfigError if `must_succeed` is set and compilation failed."""
        report = self.report()
        failed = report["failures"]
        reasons = "; ".join(_shown(each) for each in failed or report["graph_breaks"]) or "no forward pass was called"
        if self.must_succeed and (failed or not report["is_compiled"]):
            raise ConfigError("compilation.must_succeed", True, f"compiling {_noun(self.what)} failed: {reasons}", MEND)
        if not report["is_compiled"]:
            return [f"asked to compile {_noun(self.what)}, but nothing was: training runs eagerly. {reasons}"]
        said = []
        if failed:
            said.append(f"parts were not compiled and run eagerly: {reasons}")
        if report["graph_breaks"]:
            breaks = "; ".join(_shown(each) for each in report["graph_breaks"])
            said.append(f"compiled with {sum(b['times'] for b in report['graph_breaks'])} graph breaks: {breaks}")
        return said


@contextlib.contextmanager
def compiled(model: nn.Module, config: RunConfig, workload: Any) -> Iterator[Compilation | None]:
    """Context in which `model` is compiled in place, without renaming parameters; None if there is nothing to compile.
    Resets torch's counters and switches, which are global, so that each run is counted separately. Raises WorkloadError
    if blocks are to be compiled and the workload names none."""
    settings = config.compilation
    if settings.what == "nothing":
        yield None
        return
    by_name = settings.what == "blocks"
    parts = model_blocks(workload, model, wanted_by="compilation.what blocks") if by_name else [model]
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_switches(config, notes))
        options: dict[str, Any] = {"backend": settings.backend, "dynamic": settings.dynamic}
        if settings.mode != "default":
            options["mode"] = settings.mode
        functions: dict[Forward, Forward] = {}
        for part in parts:
            forward = forward_of(part)
            function = functions.setdefault(forward, torch.compile(forward, **options))
            stack.callback(replace_forward(part, function))
        yield Compilation(settings.what, settings.backend, settings.must_succeed, notes)


@contextlib.contextmanager
def _switches(config: RunConfig, notes: list[str]) -> Iterator[None]:
    """Context with torch's settings for this run and its counters at zero."""
    import torch._dynamo
    import torch._functorch.config
    from torch._dynamo.utils import clear_compilation_metrics, counters, graph_break_reasons

    settings, activations = config.compilation, config.activations
    torch._dynamo.reset()
    counters.clear()
    graph_break_reasons.clear()
    clear_compilation_metrics()
    # what cannot be compiled runs as it is; `check` says so, or ends the run
    dynamo: dict[str, Any] = {"suppress_errors": not settings.must_succeed}
    if settings.what == "model" and config.strategy.name in ("auto", "ddp"):
        # optimize_ddp cuts the graph at DDP's buckets so that they leave during the backward pass, and knows no
        # checkpointing
        splits = (
            activations.checkpointing in ("none", "budget") and config.strategy.bucket_size_mib >= DDP_SPLITS_FROM_MIB
        )
        dynamo["optimize_ddp"] = splits
        if not splits and config.scale.max_workers > 1:
            notes.append(
                "the compiled model is one graph, so gradients are synchronised after the backward pass instead of "
                "during it; compilation.what blocks overlaps them"
            )
    else:
        dynamo["optimize_ddp"] = False
    budget = activations.memory_budget if activations.checkpointing == "budget" else 1.0
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(**dynamo))
        stack.enter_context(torch._functorch.config.patch(activation_memory_budget=budget))
        if settings.cache_dir is not None:
            stack.enter_context(_environment(COMPILED, settings.cache_dir))
        try:
            yield
        finally:
            torch._dynamo.reset()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def eagerly() -> contextlib.AbstractContextManager[Any]:
    """Context for passes with shapes that will not recur. They must neither be compiled nor make shapes variable."""
    return torch.compiler.set_stance("force_eager")


def compile_error(exc: Exception) -> ConfigError | None:
    """User-facing error of a failed compilation, which `must_succeed` raises in the first step; None for other
    errors."""
    if "torch._dynamo" not in sys.modules or not isinstance(exc, torch._dynamo.exc.TorchDynamoException):
        return None
    reason = " ".join(str(exc).split("Set TORCHDYNAMO_VERBOSE")[0].split())
    return ConfigError("compilation.must_succeed", True, f"compiling failed: {reason[:500]}", MEND)


def _graph_breaks() -> list[dict[str, Any]]:
    from torch._dynamo.utils import graph_break_reasons

    times: Counter[tuple[str, int, str]] = Counter()
    for broken in graph_break_reasons:
        frame = broken.user_stack[-1] if broken.user_stack else None
        reason = next(iter(broken.reason.strip().splitlines()), "no reason given")
        times[frame.filename if frame else "", (frame.lineno or 0) if frame else 0, reason] += 1
    return [{"file": f, "line": n, "reason": reason, "times": many} for (f, n, reason), many in times.items()]


def _failures() -> list[dict[str, Any]]:
    """Frames that run entirely eagerly, each listed once."""
    from torch._dynamo.utils import get_compilation_metrics

    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for frame in get_compilation_metrics():
        if frame.fail_type is None:
            continue
        file = frame.fail_user_frame_filename or frame.co_filename or ""
        line = frame.fail_user_frame_lineno or frame.co_firstlineno or 0
        reason = " ".join((frame.fail_reason or frame.fail_type).split())[:300]
        found[file, line, reason] = {"file": file, "line": line, "reason": reason}
    return list(found.values())


def _compile_time_s() -> float:
    from torch._dynamo.utils import get_compilation_metrics

    return float(sum(frame.entire_frame_compile_time_s or 0.0 for frame in get_compilation_metrics()))


def _shown(where: dict[str, Any]) -> str:
    return f"{where['file']}:{where['line']}: {where['reason']}"


def _noun(what: str) -> str:
    return "the blocks" if what == "blocks" else "the model"
