"""Whether a Ray answers at an address, and takes this user's token: Ray itself would try for minutes, and say less."""

from __future__ import annotations

import os
import socket

from scaleray.errors import ClusterError
from scaleray.launch.cluster import token

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 20.0
"""A head that is loaded answers within seconds."""
ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A call of Ray's control store that asks for nothing; a server of Ray's client refuses it as unknown."""


def check(address: str) -> None:
    """Raise OSError for an address at which nothing listens, or not Ray, and ClusterError for another token."""
    place = address.removeprefix("ray://")
    if place.startswith(("http://", "https://")):
        raise OSError("a dashboard takes jobs (scaleray submit --to); a training connects to HOST:PORT of the head")
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        return
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    try:
        import grpc  # not all installations of Ray have it
        from ray._private.grpc_utils import init_grpc_channel
        from ray._private.ray_constants import GLOBAL_GRPC_OPTIONS
    except ImportError:
        return
    # with Ray's TLS and this user's token, where these are asked for, and past proxies, as Ray's own calls go
    channel = init_grpc_channel(place, options=GLOBAL_GRPC_OPTIONS)
    try:
        channel.unary_unary(ALIVE)(b"", timeout=ANSWER_TIMEOUT_S, wait_for_ready=True)
    except grpc.RpcError as exc:
        if exc.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise other_token(address) from exc
        if exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            tls = "with" if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true") else "without"
            said = f"something listens there, but did not answer as Ray does within {ANSWER_TIMEOUT_S:g} s"
            raise OSError(f"{said} (asked {tls} TLS, by RAY_USE_TLS)") from exc
    finally:
        channel.close()


def other_token(address: str) -> ClusterError:
    """The error of a cluster that does not take this user's token."""
    is_sent = os.environ.get(token.MODE) != "disabled"
    mine = "another than the cluster's" if is_sent else f"not sent, as {token.MODE} is disabled"
    return ClusterError(
        "the token",
        mine if token.has_token() else None,
        f"the cluster at {address} asks for its own",
        "set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to it, with RAY_AUTH_MODE=token",
    )
