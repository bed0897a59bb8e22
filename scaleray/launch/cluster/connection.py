"""The Ray cluster of a run: connect to it or start one, and list its nodes.

Every known pitfall of connecting with Ray 2.60 is handled here, with the reason next to the line.
"""

import concurrent.futures.thread  # noqa: F401 - its fork hooks must not be added while `_importing` and Ray's forks overlap
import contextlib
import gc
import importlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaleray.common.own_folder import keep_compiled_code_here
from scaleray.common.private_parts import FIRST_ANSWER, SETTINGS
from scaleray.common.progress import stage
from scaleray.config import RunConfig
from scaleray.errors import ClusterError, first_line
from scaleray.launch.cluster import loopback, own_ray, ray_settings, token

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 20.0
"""Seconds to wait for an answer: a loaded head needs a few."""
ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""Call without arguments to Ray's control store; a Ray Client server rejects it as unknown."""

NODES = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"


def check(address: str) -> None:
    """Raise OSError if nothing, or something other than Ray, listens at the address, and ClusterError if the token
    differs."""
    place = address.removeprefix("ray://")
    if place.startswith(("http://", "https://")):
        raise OSError("a dashboard accepts jobs (scaleray submit --to); a training connects to HOST:PORT of the head")
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        return
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    if not FIRST_ANSWER.is_used():
        return
    import grpc

    try:
        _call(place, ALIVE)
        if os.environ.get(token.MODE) == "token" and SETTINGS.is_used():
            _send_no_needless_token(place)
    except grpc.RpcError as exc:
        if exc.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise other_token(address) from exc
        if exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            tls = "with" if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true") else "without"
            said = f"something listens there, but did not answer as Ray does within {ANSWER_TIMEOUT_S:g} s"
            raise OSError(f"{said} (connected {tls} TLS, as RAY_USE_TLS says)") from exc


def _send_no_needless_token(place: str) -> None:
    """Disable token authentication if the cluster has no token: its processes could not call one that requires a token.

    Raises ClusterError if the user set the mode."""
    global _decided_mode
    import grpc

    is_ours = _decided_mode == "token"
    os.environ[token.MODE] = "disabled"
    ray_settings.read_again()
    try:
        _call(place, ALIVE)
    except grpc.RpcError:
        is_required = True
    else:
        is_required = False
    if is_ours and not is_required:
        _decided_mode = "disabled"
        return
    os.environ[token.MODE] = "token"
    ray_settings.read_again()
    if not is_required:
        raise ClusterError(
            token.MODE,
            "token",
            f"the cluster at {place} was started without a token, so its workers could not reach this process",
            f"unset {token.MODE}, or start the cluster with {token.MODE}=token",
        )


def _call(place: str, method: str) -> bytes:
    """Serialized reply of the control store at host:port to a call without arguments. Raises grpc.RpcError."""
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.ray_constants import GLOBAL_GRPC_OPTIONS

    # with Ray's TLS and this user's token, where these are asked for, and past proxies, as Ray's own calls go
    channel = init_grpc_channel(place, options=GLOBAL_GRPC_OPTIONS)
    try:
        answer: bytes = channel.unary_unary(method)(b"", timeout=ANSWER_TIMEOUT_S, wait_for_ready=True)
        return answer
    finally:
        channel.close()


def _num_nodes(place: str) -> int:
    """Number of living nodes of the cluster whose control store is at host:port; 0 if it gives no answer."""
    from ray.core.generated.gcs_pb2 import GcsNodeInfo
    from ray.core.generated.gcs_service_pb2 import GetAllNodeInfoReply

    try:
        nodes = GetAllNodeInfoReply.FromString(_call(place, NODES)).node_info_list
    except Exception:  # of grpc or protobuf, as of another release: connecting to it gives the reason
        return 0
    return sum(node.state == GcsNodeInfo.GcsNodeState.ALIVE for node in nodes)


def other_token(address: str) -> ClusterError:
    """Error for a cluster that rejects this user's token."""
    is_sent = os.environ.get(token.MODE) != "disabled"
    mine = "different from the cluster's" if is_sent else f"not sent, as {token.MODE} is disabled"
    return ClusterError(
        "the token",
        mine if token.has_token() else None,
        f"the cluster at {address} requires its own token",
        "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's token",
    )


DRIVER_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # the controller looks at its workers this often, and a finished run ends one look later (default 2 s); a look costs
    # 13 ms of CPU, on the training cores: at 0.25 s 5 % of one
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # workers keep the driver's directory, or relative paths in a workload would mean something else there
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # read_parquet starts 32 actors for footers at every execution by default
    "RAY_DATA_PARQUET_FOOTER_NUM_ACTORS": "1",
    # unequal collective calls would hang for ever by default
    "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "300",
    # workers' lines come through as they are, once each
    "RAY_DEDUP_LOGS": "0",
    # Train's own print would repeat every line, as workers remember their last ones
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # glibc gives memory back and takes it again in every step: 3,120 page faults a step of digits, 34 with these two
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(512 * 2**20),
    # on a worker without GPUs Ray would hide them even from code that only asks; this is also its future default
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass(frozen=True)
class Node:
    """A living node: its address, total resources and labels."""

    address: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]


OF_RAY_TRAIN = {
    # what Ray Train would set for its processes one by one, each in an environment of its own
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
    # one machine has no other to go on with; the watcher costs a process and prints an error at every start
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
"""Environment variables of all processes of a run on one node."""
GIVEN_TO_WORKERS = ("RAY_TRAIN_", "RAY_WARN_BLOCKING_", "TORCHFT_", "NCCL_RAS_")
"""Prefixes of the driver's environment variables that Ray Train passes to its processes."""
OWN_ENVIRONMENT = {
    # with Ray's default of 15 workers give way to everything, and to the recorder; with it at 19, and glibc's two
    # settings above, digits on 2 of 2 cores came from 0.78 to 0.86 of torchrun's speed
    "RAY_worker_niceness": "0",  # Ray's own spelling
    **OF_RAY_TRAIN,
    loopback.VARIABLE: "0",
}
"""Environment variables of a Ray started here, besides `DRIVER_ENVIRONMENT`; the user's values take precedence."""

_own_cluster = False
"""Whether this process started the Ray that it is connected to."""
_workers_inherit = False
"""Whether workers inherit all their variables from the environment of their node or job."""
_decided_mode: str | None = None
"""Value that `set_auth_mode` gave RAY_AUTH_MODE; None if the user set it."""


def is_own() -> bool:
    """Whether the connected Ray was started here, for this command alone."""
    return _own_cluster


def workers_inherit() -> bool:
    """Whether workers get all their variables from their node or job, so that none needs an environment of its own."""
    return _workers_inherit


def publishes_metrics(config: RunConfig) -> bool:
    """Whether the nodes of the connected Ray accept metrics: a Ray started here without a dashboard has no agent for
    them."""
    return not _own_cluster or config.scale.dashboard


@contextlib.contextmanager
def connected(config: RunConfig, *, meanwhile: Sequence[str] = ()) -> Iterator[str]:
    """Connect to the cluster of RAY_ADDRESS, or to a local one that lives as long as the context; yields its address.

    An existing connection is reused and left open. meanwhile: modules that the caller needs next, imported while Ray's
    own processes start. Raises ClusterError."""
    global _own_cluster, _workers_inherit
    for name, value in DRIVER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(config.scale.launch_timeout_s)
    keep_compiled_code_here()
    set_auth_mode()
    if _is_connected():
        yield _address()
        return
    address = os.environ.get("RAY_ADDRESS") or "local"
    is_good = False
    try:
        with _importing(meanwhile, "ray.train.torch"):
            if address != "local":
                with stage(f"connecting to Ray at {address}"), own_ray.forking_on(address, config) as forks:
                    _workers_inherit = _connect(address, forks=forks)
            else:
                loopback.refuse_open()
                with stage("starting Ray on this machine"):
                    try:
                        own_ray.start(config, {k: os.environ.get(k, v) for k, v in OWN_ENVIRONMENT.items()})
                    except Exception as exc:  # where a node does not come up in time, Ray raises just that
                        raise _own_ray_failed(exc) from exc
                _own_cluster = _workers_inherit = True
            if _workers_inherit:
                own_ray.request_workers(config)
        yield _address()
        is_good = True
    finally:
        _own_cluster = _workers_inherit = False
        own_ray.stop(keeps_logs=not is_good)


@contextlib.contextmanager
def _importing(modules: Sequence[str], later: str) -> Iterator[None]:
    """Import these modules in a thread while Ray starts, and `later` after the context. Import errors surface where a
    module is used."""
    ready = threading.Event()

    def work() -> None:
        with contextlib.suppress(Exception):
            for name in modules:
                importlib.import_module(name)
        ready.set()
        with contextlib.suppress(Exception):
            importlib.import_module(later)

    was_collecting = gc.isenabled()
    gc.disable()  # a tenth of the time of imports
    # no daemon: a command that is refused at once would end in the middle of an import, and libtorch aborts then
    threading.Thread(target=work, name="scaleray-imports").start()
    try:
        yield
        with stage("importing"):  # an import that waits for one that fails gets a module without its names
            ready.wait()
    finally:
        if was_collecting:
            gc.enable()


@contextlib.contextmanager
def joined(address: str, *, name: str = "--address") -> Iterator[list[Node]]:
    """List the living nodes of a running cluster; an existing connection is reused. name: source of the address.

    Raises ClusterError."""
    for variable, value in DRIVER_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    set_auth_mode(address)
    import ray

    if ray.is_initialized():
        yield alive_nodes()
        return
    _connect(address, name=name)
    try:
        yield alive_nodes()
    finally:
        ray.shutdown()


def set_auth_mode(address: str | None = None) -> None:
    """Set the mode of token authentication, since clients of Ray 2.60 do not adopt the cluster's mode.

    address: of the cluster; `local` for one started here; None for that of RAY_ADDRESS, or a local one. A mode set by
    the user remains; any other is decided again for each address. Raises ClusterError for a new cluster if this process
    is connected to one without a token."""
    global _decided_mode
    loopback.ask_directly()
    given = os.environ.get(token.MODE)
    if given is not None and given != _decided_mode:
        if not _is_connected():
            ray_settings.read_again()  # it may have been set after Ray's core was imported
        return
    if _is_connected():
        if address == "local" and given == "disabled":
            raise ClusterError(
                token.MODE,
                given,
                "this process is connected to a Ray without a token, so a new one would have none either",
                "end the connection first (ray.shutdown()), or start the cluster from another process",
            )
        return
    connects = (address or os.environ.get("RAY_ADDRESS", "local")) != "local"
    # a cluster that we start gets a token of its own if there is none; one that we join without a token has none
    _decided_mode = os.environ[token.MODE] = "disabled" if connects and not token.has_token() else "token"
    ray_settings.read_again()


def _address() -> str:
    import ray

    address: str = ray.get_runtime_context().gcs_address
    return address


def _is_connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _connect(address: str, *, name: str = "RAY_ADDRESS", forks: Callable[[int], dict[str, Any]] | None = None) -> bool:
    """Connect to the cluster; returns whether its workers inherit all variables. forks: see `own_ray.forking_on`."""
    import ray

    inherit = False
    try:
        found = _gcs_address(address)
        check(address if found is None or address.startswith("ray://") else found)
        environment = runtime_env(found)
        if forks is not None and found is not None and FIRST_ANSWER.is_used() and not address.startswith("ray://"):
            num_nodes = _num_nodes(found)
            inherit = num_nodes == 1
            more = forks(num_nodes)
            given = {name: value for name, value in os.environ.items() if name.startswith(GIVEN_TO_WORKERS)}
            environment["env_vars"] |= ({**given, **OF_RAY_TRAIN} if inherit else {}) | more.pop("env_vars", {})
            environment |= more
        with loopback.reaching(address):
            ray.init(address=address, runtime_env=environment, logging_level=logging.ERROR)
        return inherit
    except ClusterError:
        raise
    except Exception as exc:  # Ray raises of every kind
        if "ersion mismatch" in str(exc):
            raise ClusterError(
                name,
                address,
                f"it runs other versions: {' '.join(str(exc).split())}",
                "run the command with the cluster's own Ray and Python",
            ) from exc
        raise ClusterError(
            name,
            address,
            f"no Ray cluster answers there: {first_line(exc)}",
            "check the address and the token (RAY_AUTH_MODE), or leave the address out to use only this machine",
        ) from exc


def _own_ray_failed(exc: BaseException) -> ClusterError:
    return ClusterError.problem(
        "Ray on this machine",
        f"did not start: {first_line(exc).rstrip('.')}",
        f"its logs: {ray_logs()}\n  on a loaded machine, a second attempt often succeeds; --local trains without Ray",
    )


def ray_logs() -> str:
    """Folder of the logs of Ray's processes."""
    return f"{own_ray.ray_folder()}/session_latest/logs"


def _gcs_address(address: str) -> str | None:
    """host:port of the cluster's control store, if the address holds it; `auto` is resolved after connecting."""
    if address != "auto":
        return address.removeprefix("ray://")
    if not FIRST_ANSWER.is_used():
        return None
    import ray._private.services as services

    found = services.find_gcs_addresses()
    return next(iter(found)) if len(found) == 1 else None


def runtime_env(address: str | None) -> dict[str, Any]:
    """Job-level environment of every process of a run; `address` prevents Ray Train from using another cluster."""
    variables = {name: os.environ.get(name, value) for name, value in DRIVER_ENVIRONMENT.items()}
    if address is not None:
        variables["RAY_ADDRESS"] = address
    return {"env_vars": variables}


def alive_nodes() -> list[Node]:
    """Living nodes of the connected cluster, starting with the driver's."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    found = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: (n["NodeID"] != here, n["NodeManagerAddress"]))
    return [Node(n["NodeManagerAddress"], n["Resources"], n.get("Labels", {})) for n in found]


def topology(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Nodes and their devices, for the record."""
    return [
        {
            "node": n.address,
            "cpus": n.resources.get("CPU", 0),
            "gpus": n.resources.get("GPU", 0),
            "accelerator": next((k.partition(":")[2] for k in n.resources if k.startswith("accelerator_type:")), None),
        }
        for n in nodes
    ]


def input_cpus(config: RunConfig, nodes: Sequence[Node] = ()) -> float:
    """Ray CPUs that the input tasks of one worker may use together: an equal share of the CPUs that workers leave free,
    and at least its share of `data.reserved_cpus`."""
    scale = config.scale
    left = sum(n.resources.get("CPU", 0.0) for n in nodes) - scale.max_workers * scale.cpus_per_worker
    return max(0.01, round(max(config.data.reserved_cpus, left) / scale.max_workers, 2))


def own_placement_groups() -> set[str]:
    """Ids of placement groups that this driver's actors created and that hold or request resources."""
    import ray

    job = ray.get_runtime_context().get_job_id()  # an id ends with that of its job
    table = ray.util.placement_group_table()
    return {number for number, group in table.items() if number.endswith(job) and group["state"] != "REMOVED"}


def remove_placement_groups(numbers: Iterable[str]) -> None:
    """Remove the placement groups of actors that died; Ray itself would keep them until the driver exits.

    Ray Train's own cleaner handles a group only once its workers have started. If a controller died earlier, its group
    would remain, and the next controller would wait for the resources forever."""
    import ray
    from ray.util.placement_group import PlacementGroup

    for number in numbers:
        ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number))))
