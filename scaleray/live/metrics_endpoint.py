"""A page on 127.0.0.1 with a run's metrics in Prometheus' text format, generated for each request."""

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
"""Address of the page, which has no password and is therefore served only on this machine."""
KEY = "monitoring.port"


class MetricsEndpoint:
    """Serves the result of `series` in threads until it is closed. Raises ConfigError if the port is in use."""

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
    """HTTP server with a thread for each request, so that a slow client does not delay others."""

    daemon_threads = True


class _Silent(WSGIRequestHandler):
    """Request handler that logs nothing."""

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class _Collector:
    """Collector of the run's series for prometheus_client."""

    def __init__(self, series: Callable[[], Sequence[Series]]) -> None:
        self._series = series

    def describe(self) -> Iterable[Any]:
        """Return no descriptions, as series cannot be requested before the run exists."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the metrics that currently have a value."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        for metric, found in by_metric(self._series()).items():
            family = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            values = family(prometheus_name(metric), metric.help, labels=metric.all_labels)
            for one in found:
                values.add_metric([one.labels[name] for name in metric.all_labels], one.value)
            yield values


def chosen_port(port: int | None) -> int | None:
    """Port on which a run can serve: `port`, or a free one if it is 0. Raises ConfigError if it is in use; if it is
    taken later, the endpoint reports it.
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
    """Error for a port that cannot be used."""
    why = {errno.EADDRINUSE: "another program listens on it", errno.EACCES: "you are not allowed to listen on it"}
    want = f"{why.get(problem.errno or 0, problem.strerror)} on {HOST}"
    return ConfigError(KEY, port, want, "another run may be using it; 0 chooses a free port and prints it")
