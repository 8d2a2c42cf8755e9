"""Implements `kvloft serve --metrics`, which exports metrics at http://HOST:PORT/metrics.

Each request reads the data that `kvloft status` shows. This module does not access the store.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvloft.counters import Metric, Scope, exported
from kvloft.errors import ConfigError
from kvloft.version import BUILD_INFO_HELP, BUILD_LABELS

IDLE_TIMEOUT_S: Final = 10.0
"""Connections without a request are closed after this time, to free their descriptors."""
LABEL: Final = "namespace"
INFO_HELP: Final = "Each namespace's model; the value is always 1"


def address(text: str) -> tuple[str, int]:
    """Parse ``PORT`` or ``HOST:PORT``. The default host is 127.0.0.1. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if re.fullmatch(r"[0-9]{1,9}", port) and int(port) > 65535:  # port 0 selects any free port
        raise ConfigError(f"--metrics {text!r}: the port must be between 1 and 65535.")
    if not re.fullmatch(r"[0-9]{1,5}", port):
        raise ConfigError(
            f"--metrics {text!r} has no valid port; use --metrics 9180, or 0.0.0.0:9180 for access "
            "from other machines."
        )
    return host.strip("[]") or "127.0.0.1", int(port)


def serve(
    where: tuple[str, int], status: Callable[[], dict[str, Any]]
) -> tuple[str, Callable[[], None]]:
    """Export ``status`` at ``where``. Return the URL and a function that stops the export.

    Raises ConfigError if the address is unavailable.
    """
    # Imported lazily, because no other command needs this package.
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status))
    try:
        server, thread = start_http_server(where[1], where[0], registry)
    except (OSError, UnicodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "invalid host name"
        raise ConfigError(
            f"--metrics cannot listen on {where[0]}:{where[1]} ({reason}); use another host or "
            "port."
        ) from e

    server.RequestHandlerClass.timeout = IDLE_TIMEOUT_S
    server.handle_error = lambda *_: None  # do not log a traceback for each broken connection

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    host = f"[{where[0]}]" if ":" in where[0] else where[0]
    return f"http://{host}:{server.server_port}/metrics", end


class _Collector:
    """Collects server and namespace metrics for prometheus_client."""

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        from kvloft.cli.inspect import fields_of  # imported lazily, because it imports rich

        status = self._status()
        spaces = [  # stats is empty until the store is open
            (space["namespace"].hex()[:16], space["stats"] | {"slabs": space["slabs"]})
            for space in status["namespaces"]
        ]
        for metric in exported(Scope.NAMESPACE):
            family = _family(metric, labels=[LABEL])
            for label, stats in spaces:
                if metric.name in stats:
                    family.add_metric([label], stats[metric.name])
            yield family
        num_engines = sum(len(space["engines"]) for space in status["namespaces"])
        sizes = {name: status[name] for name in ("host_bytes", "slab_bytes")}
        stats = status["stats"] | sizes | {"engines": num_engines}
        for metric in exported(Scope.SERVER):
            if metric.name in stats:  # disk metrics are missing until the first measurement
                yield _family(metric, value=stats[metric.name])
        info = GaugeMetricFamily("kvloft_namespace_info", INFO_HELP, labels=[LABEL, "model"])
        for space in status["namespaces"]:
            fields = fields_of(space["description"])
            model = fields.get("model", "") if isinstance(fields, dict) else ""
            info.add_metric([space["namespace"].hex()[:16], model], 1)
        yield info
        build = GaugeMetricFamily("kvloft_build_info", BUILD_INFO_HELP, labels=list(BUILD_LABELS))
        build.add_metric(list(BUILD_LABELS.values()), 1)
        yield build


def _family(metric: Metric, **settings: Any) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    family = GaugeMetricFamily if metric.is_gauge else CounterMetricFamily
    return family(f"kvloft_{metric.name}", metric.help_text, **settings)
