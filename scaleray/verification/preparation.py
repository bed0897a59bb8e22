"""Prepare both kinds of verification: connect, load workload and data, plan variants, check that they fit."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaleray.config import RunConfig
from scaleray.config.brought import with_brought
from scaleray.data import load_sources
from scaleray.data.source_interface import Source
from scaleray.launch.cluster.awaited_nodes import nodes_for
from scaleray.launch.cluster.capacity import check_option_fits
from scaleray.launch.cluster.connection import Node
from scaleray.launch.cluster.gpu_workers import with_gpus_decided
from scaleray.launch.session.opened import (
    check_learning_rate,
    check_started_once,
    connected_unless,
    with_absolute_paths,
)
from scaleray.launch.workers.gloo import UserCode
from scaleray.recording import store
from scaleray.records.run_record import Say
from scaleray.records.start import steady_time
from scaleray.verification.verification_plan import Plan, default_world_sizes, make_plan, on_workers, strategy_names
from scaleray.verification.verify_options import VerifyOptions

OPTION = "--world-sizes"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """A verification that is ready to run."""

    config: RunConfig
    options: VerifyOptions
    plan: Plan
    sources: dict[str, Source]
    code: UserCode
    workload: Any
    tracking_uri: str
    started_at: float


@contextlib.contextmanager
def prepared(
    config: RunConfig, options: VerifyOptions, workload: Any, *, base_dir: Path | None, say: Say
) -> Iterator[Verification]:
    """Context in which workers can be started, after everything has been checked. Raises UsageError."""
    started_at = steady_time()
    check_started_once(say)
    strategy_names(options)  # for its error, before a cluster is started
    config = with_absolute_paths(config)
    if options.world_sizes is None:
        options = dataclasses.replace(options, world_sizes=default_world_sizes(config))
    tracking_uri = store.resolve_uri(config.tracking.uri)
    store.check_reachable(tracking_uri)
    code = UserCode(config.workload.name if workload is None else None, config.workload.args, base_dir, workload)
    workload = code.load()
    config = with_brought(config, workload)
    check_learning_rate(config, workload)
    with connected_unless(config, local=options.local):
        largest = _alone(on_workers(config, "auto", options.sizes[-1]))
        nodes = [] if options.local else nodes_for(largest, option=OPTION)
        config = with_gpus_decided(config, nodes, say=say)
        sources = load_sources(workload, in_steps=config.is_in_steps)
        plan = make_plan(config, options, workload, sources)
        if not options.local:
            _check_every_group_fits(plan, nodes)
        yield Verification(
            config=config,
            options=options,
            plan=plan,
            sources=sources,
            code=code,
            workload=workload,
            tracking_uri=tracking_uri,
            started_at=started_at,
        )


def _check_every_group_fits(plan: Plan, nodes: Sequence[Node]) -> None:
    hint = "leave this size out, or verify on this machine alone with --local"
    for variants in plan.groups.values():
        check_option_fits(OPTION, _alone((variants or [plan.reference])[0].job.config), nodes, hint=hint)


def _alone(config: RunConfig) -> RunConfig:
    """The config without CPUs reserved for input tasks, since none run in a verification."""
    return config.changed({"data.reserved_cpus": 0.0})
