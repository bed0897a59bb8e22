"""A page on 127.0.0.1 with a run's metrics in Prometheus' text format, made for each request."""

import errno
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from scaleray.common.metric import prometheus_name
from scaleray.errors import ConfigError
from scaleray.live.state.series import Series, by_metric

HOST = "127.0.0.1"
"""The page has no password, so it is served only on this machine."""
KEY = "monitoring.port"


class MetricsEndpoint:
    """Serve the result of `series` in separate threads until it is closed. Raises ConfigError for a port in use."""

    def __init__(self, port: int, series: Callable[[], Sequence[Series]]) -> None:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(series))
        try:
            self._server = make_server(HOST, port, make_wsgi_app(registry), _Server, _Silent)
        except OSError as exc:
            raise port_error(port, exc) from None
        # prometheus_client's own server takes half a second to stop, at the end of every run
        serve = partial(self._server.serve_forever, poll_interval=0.02)
        self._thread = threading.Thread(target=serve, name="scaleray-metrics-page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A thread for each request: a slow client delays no other."""

    daemon_threads = True


class _Silent(WSGIRequestHandler):
    """Request handler that logs nothing."""

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class _Collector:
    """Collector for prometheus_client."""

    def __init__(self, series: Callable[[], Sequence[Series]]) -> None:
        self._series = series

    def describe(self) -> Iterable[Any]:
        """Return no descriptions: series must not be requested before there is a run."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics that have a value now."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        for metric, found in by_metric(self._series()).items():
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            values = family(prometheus_name(metric), metric.help, labels=metric.all_labels)
            for one in found:
                values.add_metric([one.labels[name] for name in metric.all_labels], one.value)
            yield values


def chosen_port(port: int | None) -> int | None:
    """The port that a run may serve on: `port`, or a free one for 0. Raises ConfigError for one in use; if it is taken
    later, the endpoint itself reports it.
    """
    if port is None:
        return None
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server itself does
            probe.bind((HOST, port))
            return int(probe.getsockname()[1])
    except OSError as exc:
        raise port_error(port, exc) from None


def port_error(port: int, problem: OSError) -> ConfigError:
    """Message on a port that cannot be used."""
    why = {errno.EADDRINUSE: "another program listens on it", errno.EACCES: "this user may not listen on it"}
    want = f"{why.get(problem.errno or 0, problem.strerror)} on {HOST}"
    return ConfigError(KEY, port, want, "0 chooses a free port and prints it; another run may be using this one")
