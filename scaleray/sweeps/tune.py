"""A single Ray Tune experiment with the requested trials, in placement groups that contain all workers of a trial.

Nothing here depends on Tune's own state: a sweep continues from its own records.
"""

import contextlib
import dataclasses
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scaleray.checkpoints.storage import Store
from scaleray.launch.cluster.capacity import num_concurrent
from scaleray.launch.cluster.connection import Node
from scaleray.launch.workers.loaded_workload import ship_user_code
from scaleray.records.sweep_record import Trial
from scaleray.sweeps.sweep_plan import PAUSING, Material, SweepPlan

RETRIES = 1  # additional attempts for a trial whose process was lost
TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # scaleray writes the trials' records
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "RAY_AIR_NEW_OUTPUT": "0",  # the new output prints every result, whatever `verbose` is
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # the driver prints each, once
    "TUNE_GLOBAL_CHECKPOINT_S": "86400",  # a sweep continues from its own records
}
PENDING_VARIABLE = "TUNE_MAX_PENDING_TRIALS_PG"
TUNE_FILES, STATES = "ray_tune", "states"  # sub-folders of the sweep's folder
FEW_PENDING = "2"  # pending placement groups; finished trials pass theirs on


def run_experiment(
    plan: SweepPlan,
    nodes: list[Node],
    *,
    space: dict[str, Any],
    scheduler: Any,
    searcher: Any = None,
    num_samples: int = 1,
    folder: str,
    on_trial: Callable[[Trial], None],
) -> set[int]:
    """Run trials to their end, or until the user stops them; return the numbers of those that ended.

    space: Tune's search space, empty with a searcher. folder: the sweep's folder, for Tune's files and trials' states.
    on_trial: called with each trial's record as it ends.
    """
    from ray import tune

    from scaleray.sweeps.trial import VALUE
    from scaleray.sweeps.trial_collector import TrialCollector

    collector = TrialCollector(plan, on_trial)
    pauses = plan.question.scheduler in PAUSING
    tuner = tune.Tuner(
        _trainable(plan, folder),
        param_space=space,
        tune_config=tune.TuneConfig(
            metric=None if searcher is not None else VALUE,
            mode=None if searcher is not None else plan.direction,
            scheduler=scheduler,
            search_alg=searcher,
            num_samples=num_samples,
            reuse_actors=True,
            # paused trials count as running: with a limit they would wait for each other forever
            max_concurrent_trials=None if pauses else num_concurrent(plan.config(plan.candidates[0]), nodes),
            trial_name_creator=_trial_name,
            trial_dirname_creator=_trial_name,
        ),
        run_config=tune.RunConfig(
            name=f"tune-{secrets.token_hex(3)}",
            storage_path=f"{folder}/{TUNE_FILES}",
            callbacks=[collector],
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=RETRIES),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    )
    with _pending(None if pauses else FEW_PENDING):
        tuner.fit()
    return collector.done


def _trainable(plan: SweepPlan, folder: str) -> Any:
    """Return the function that Tune runs for each trial, in a placement group with all of its workers."""
    import ray
    from ray import tune
    from ray.tune.execution.placement_groups import PlacementGroupFactory

    from scaleray.launch.workers.ray_train import worker_resources
    from scaleray.sweeps.trial import SharedPlan, SweepTrial

    for material in plan.materials.values():
        ship_user_code(material.workload)
    shipped = dataclasses.replace(plan, materials={key: _shipped(m) for key, m in plan.materials.items()})
    shared = SharedPlan(shipped, pauses=plan.question.scheduler != "fifo", state_path=f"{folder}/{STATES}")
    scale = plan.base.scale
    labels = {"bundle_label_selector": [dict(scale.label_selector)] * plan.workers} if scale.label_selector else {}
    resources = PlacementGroupFactory([worker_resources(plan.base)] * plan.workers, strategy=scale.placement, **labels)
    return tune.with_resources(tune.with_parameters(SweepTrial, shared=[ray.put(shared)]), resources)


def remove_scraps(folder: str) -> None:
    """Remove Tune's own files and the states of trials, which are no longer needed."""
    for name in (TUNE_FILES, STATES):
        with contextlib.suppress(Exception):  # leftover files are harmless
            Store(folder).delete_folder(name)


@contextlib.contextmanager
def quiet_tune() -> Iterator[None]:
    """Silence Tune in this process for the duration of the context, then restore the environment and log levels."""
    before = {name: os.environ.get(name) for name in TUNE_ENVIRONMENT}
    os.environ |= TUNE_ENVIRONMENT
    loggers = {name: logging.getLogger(name) for name in ("ray.tune", "ray.train", "ray.air")}
    levels = {name: logger.level for name, logger in loggers.items()}
    for logger in loggers.values():
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        _restore(before)
        for name, logger in loggers.items():
            logger.setLevel(levels[name])


@contextlib.contextmanager
def _pending(number: str | None) -> Iterator[None]:
    before = {PENDING_VARIABLE: os.environ.get(PENDING_VARIABLE)}
    if number is not None:
        os.environ[PENDING_VARIABLE] = number
    try:
        yield
    finally:
        _restore(before)


def _restore(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _shipped(material: Material) -> Material:
    """The material in transferable form: the workload as bytes, of which each trial makes a copy, and references to the
    data."""
    import ray
    from ray import cloudpickle

    references = {name: ray.put(source) for name, source in material.sources.items()}
    return dataclasses.replace(material, workload=cloudpickle.dumps(material.workload), sources=references)


def _trial_name(trial: Any) -> str:
    return f"trial-{trial.trial_id}"
