"""Private parts of Ray and MLflow that scaleray overrides or calls: their benefit, and whether they are used.

A part is used if everything that it replaces has the recorded signature and the library's release is the tested one.
Otherwise that part is disabled, with one line in the log. `SCALERAY_PRIVATE_PARTS=0` disables all parts that only save
time. A protective part depends only on the signatures: it cannot be disabled, and is used with untested releases too.
"""

import functools
import importlib
import inspect
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from scaleray.common.installed import NEWEST_TESTED, is_tested

SWITCH = "SCALERAY_PRIVATE_PARTS"
"""Environment variable: 0 disables all parts that only save time."""
ADDED_BY_RAY = "_ray_trace_ctx"
"""Parameter that Ray adds to the methods of a class when it makes the class an actor."""


@dataclass(frozen=True)
class PrivatePart:
    """One private part.

    file: module that uses it. gain, without: effect of the part, and of its absence. signatures: parameters of the
    replaced or called functions, by `module:name`. protects: whether it does more than save time.
    """

    name: str
    library: str
    file: str
    gain: str
    without: str
    signatures: Mapping[str, str]
    protects: bool = False

    def is_possible(self) -> bool:
        """Whether the switch and the installed release allow the part. Does not import the library."""
        if self.protects:
            return True
        if os.environ.get(SWITCH) == "0":
            return False
        if not is_tested(self.library):
            _log_once(self.name, f"{self.library} {NEWEST_TESTED[self.library]} is the tested release")
            return False
        return True

    def is_used(self) -> bool:
        """Whether the part is used here. Imports the modules that it overrides."""
        return self.is_possible() and self._is_as_recorded()

    def _is_as_recorded(self) -> bool:
        for place, recorded in self.signatures.items():
            found = signature_of(place)
            if found != recorded:
                _log_once(self.name, f"{place} is {found or 'missing'} instead of {recorded}")
                return False
        return True


def signature_of(place: str) -> str | None:
    """Parameters of `module:name` with their defaults, without annotations; None if it is missing or not callable."""
    module, _, path = place.partition(":")
    try:
        found = inspect.signature(functools.reduce(getattr, path.split("."), importlib.import_module(module)))  # type: ignore[arg-type]
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values() if p.name != ADDED_BY_RAY]
    return str(found.replace(parameters=plain, return_annotation=found.empty))


@functools.cache
def _log_once(name: str, reason: str) -> None:
    logging.getLogger(__name__).warning("%s is off: %s", name, reason)


NODE = "ray._private.node:Node"
POLICY = "ray.train.v2._internal.execution.scaling_policy:FixedScalingPolicy"
LEAN_NODE = PrivatePart(
    "lean node",
    "ray",
    "scaleray/launch/cluster/lean_node.py",
    "a node starts without the autoscaler's monitor and the dashboard's processes: 1.9 CPU seconds",
    "Ray starts them",
    {
        f"{NODE}.start_monitor": "(self)",
        f"{NODE}.start_api_server": "(self, *, include_dashboard, raise_on_failure)",
        "ray._private.utils:get_dashboard_dependency_error": "()",
    },
)
FORKED_WORKERS = PrivatePart(
    "forked workers",
    "ray",
    "scaleray/launch/cluster/worker_template.py",
    "workers are forks of one process that has imported torch and Ray: 4 CPU seconds a worker",
    "each worker is a new interpreter",
    {
        f"{NODE}.start_raylet": "(self, plasma_directory, fallback_directory, object_store_memory, use_valgrind=False, "
        "use_profiler=False)",
        "ray._private.runtime_env.context:RuntimeEnvContext": "(command_prefix=None, env_vars=None, "
        "py_executable=None, override_worker_entrypoint=None, java_jars=None)",
        "ray._private.utils:set_omp_num_threads_if_unset": "()",
        "ray.actor:ActorClassID.from_random": "()",
        "ray.actor:ActorClassID.size": "()",
    },
)
EARLY_WORKERS = PrivatePart(
    "early workers",
    "ray",
    "scaleray/launch/cluster/own_ray.py",
    "on one node, the processes of a run's workers start while the driver reads its data",
    "each starts when it is needed",
    {
        "ray._private.grpc_utils:init_grpc_channel": "(address, options=None, asynchronous=False, credentials=None)",
        "ray.runtime_context:RuntimeContext.get_runtime_env_string": "(self)",
    },
)
LEAN_TRAINER = PrivatePart(
    "lean trainer",
    "ray",
    "scaleray/launch/workers/lean_trainer.py",
    "Ray Train starts without its cleaner, dataset manager and autoscaling coordinator, and without torch in its "
    "controller: 5.1 CPU seconds; with spares, a run ends even if a lost node stays away",
    "Ray Train starts them, and waits for the node",
    {
        "ray.train.torch:TorchTrainer._create_default_callbacks": "(self)",
        "ray.train.torch:TorchTrainer._initialize_and_run_controller": "(self, **controller_init_kwargs)",
        "ray.train.torch:TorchTrainer._register_sigint_handler": "(self, controller)",
        "ray.train.v2._internal.execution.controller.controller:TrainController": "(train_fn_ref, train_run_context, "
        "scaling_policy, failure_policy, callbacks=None, validation_config=None)",
        "ray.train.v2._internal.exceptions:UserExceptionWithTraceback": "(exc, traceback_str)",
        "ray.train.v2._internal.execution.controller.controller:TrainController._replace_bad_workers": "(self, "
        "poll_status)",
        "ray.train.v2._internal.execution.controller.controller:TrainController._is_training_succeeded": "("
        "worker_group_status)",
        "ray.train.v2._internal.execution.worker_group:WorkerGroup._get_worker_runtime_env": "(custom_runtime_env)",
        POLICY: "(scaling_config)",
        f"{POLICY}.after_controller_start": "(self, train_run_context)",
        f"{POLICY}._send_resource_request": "(self)",
        f"{POLICY}._maybe_send_resource_request": "(self)",
        f"{POLICY}._cancel_resource_request": "(self)",
    },
)
QUIET_WATCHER = PrivatePart(
    "quiet watcher",
    "ray",
    "scaleray/launch/workers/ray_train.py",
    "a line of Ray Train's preemption watcher, logged as an error at every start, is hidden",
    "the line is shown; it is harmless",
    {
        "ray._private.ray_logging:WorkerStandardStreamDispatcher.add_handler": "(self, name, handler)",
        "ray._private.ray_logging:WorkerStandardStreamDispatcher.emit": "(self, data)",
    },
)
LOOPBACK = PrivatePart(
    "loopback",
    "ray",
    "scaleray/launch/cluster/loopback.py",
    "a Ray on this machine listens only on 127.0.0.1 (`RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1` is its own switch)",
    "it listens on all interfaces, and requires the token",
    {"ray._private.services:get_node_ip_address": "(address=None)", "ray.util:get_node_ip_address": "(address=None)"},
    protects=True,
)
SETTINGS = PrivatePart(
    "late settings",
    "ray",
    "scaleray/launch/cluster/ray_settings.py",
    "a token and its mode take effect after Ray has been imported",
    "they take effect if they are set before Ray is imported",
    {
        "ray._raylet:Config.initialize": "(config_list)",
        "ray._raylet:AuthenticationTokenLoader.instance": "()",
        "ray._raylet:AuthenticationTokenLoader.reset_cache": "(self)",
    },
    protects=True,
)
PATIENT_START = PrivatePart(
    "patient start",
    "ray",
    "scaleray/launch/cluster/lean_node.py",
    "a node that starts slowly on a loaded machine is waited for, up to 4 minutes, while its raylet lives",
    "Ray gives up after 30 s",
    {
        f"{NODE}.start_raylet": "(self, plasma_directory, fallback_directory, object_store_memory, use_valgrind=False, "
        "use_profiler=False)",
        "ray._private.services:get_node": "(gcs_address, node_id)",
    },
    protects=True,
)
FIRST_ANSWER = PrivatePart(
    "first answer",
    "ray",
    "scaleray/launch/cluster/connection.py",
    "an address without Ray, or with another token, is reported within seconds",
    "Ray's own error reports it, after its timeout",
    {
        "ray._private.grpc_utils:init_grpc_channel": "(address, options=None, asynchronous=False, credentials=None)",
        "ray._private.services:find_gcs_addresses": "()",
    },
    protects=True,
)
EMPTY_ANSWERS = PrivatePart(
    "empty answers",
    "mlflow",
    "scaleray/recording/store.py",
    "an answer without a body, as from a proxy whose MLflow is down, counts as an error, and the write is repeated",
    "MLflow's client takes such an answer for success, so the points are only in the run folder",
    {"mlflow.utils.rest_utils:verify_rest_response": "(response, endpoint, expected_status=200)"},
    protects=True,
)
PARTS = (
    LEAN_NODE, FORKED_WORKERS, EARLY_WORKERS, LEAN_TRAINER, QUIET_WATCHER, LOOPBACK, PATIENT_START, SETTINGS,
    FIRST_ANSWER, EMPTY_ANSWERS,
)  # fmt: skip
