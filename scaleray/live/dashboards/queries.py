"""PromQL expressions built from the tables of metrics; no other dashboard file contains a metric's name.

Every selection is filtered by the variables above the panels: job and instance (the scraped target), also the name and
id of the run for its metrics, and rank and node for metrics of each rank."""

from scaleray.common.live_metrics import STEPS_PLANNED
from scaleray.common.metric import RANK_LABELS, RUN_LABELS, Metric, prometheus_name
from scaleray.live.dashboards.panels import Query
from scaleray.live.foreign import ALERTS, ForeignMetric

RUN_NAME, RUN_ID = RUN_LABELS
RANK, NODE = RANK_LABELS
SHORT_ID = "id"
"""Label added by `each_run`: the first letters of a run's id, to distinguish runs of the same name in a legend."""
OF_RUNS = ", ".join(RUN_LABELS)
WINDOW = "$__rate_interval"
"""Grafana variable: an interval of at least four scrapes, whatever the panel's width and time range."""
VARIABLE_OF = {RUN_NAME: "run"}
"""Variables whose name differs from their label."""


def where(label: str, value: str, *, is_pattern: bool = False) -> str:
    """A label matcher."""
    return f'{label}{"=~" if is_pattern else "="}"{value}"'


def each_run(expr: str, what: str = "") -> Query:
    """Query with one series per run, which keeps the labels of name and id, and a legend of quantity and run."""
    of = f"{{{{{RUN_NAME}}}}} {{{{{SHORT_ID}}}}}"
    return Query(
        f'label_replace({expr}, "{SHORT_ID}", "$1", "{RUN_ID}", "(.{{4}}).*")', f"{what} of {of}" if what else of
    )


def as_scraped(label: str) -> str:
    """Name of a label in Prometheus, which renames a run's labels that collide with the target's."""
    return f"exported_{label}" if label in ("job", "instance") else label


def of_target(*labels: str) -> tuple[str, ...]:
    """Matchers for the scraped target and for further labels that have a variable."""
    labels = ("job", "instance", *labels)
    return tuple(where(label, f"${VARIABLE_OF.get(label, label)}", is_pattern=True) for label in labels)


def select(metric: Metric, *matchers: str) -> str:
    """Series of a scaleray metric, filtered by the variables."""
    labels = (*RUN_LABELS, *(RANK_LABELS if metric.is_by_rank else ()))
    return f"{prometheus_name(metric)}{{{','.join((*of_target(*labels), *matchers))}}}"


def foreign(metric: ForeignMetric, *matchers: str) -> str:
    """Series of another program's metric, filtered by the variables, including the node if a label has its address."""
    node = (where(metric.node_label, "$node", is_pattern=True),) if metric.node_label else ()
    return f"{metric.name}{{{','.join((*of_target(), *node, *matchers))}}}"


def once(metric: Metric, *labels: str) -> str:
    """One series per run and per value of further labels.

    Takes the largest value, as the series of the old and the new worker coexist for a minute after a restart."""
    return over(metric, "max", *labels)


def so_far(counter: Metric) -> str:
    """Number of occurrences in a run: 0 before the first one, when Ray does not publish the counter yet."""
    return f"{once(counter)} or 0 * {once(STEPS_PLANNED)}"


def over(metric: Metric, how: str, *labels: str) -> str:
    """Aggregation over the ranks, nodes and attempts of a run, but not over further labels."""
    return f"{how} by ({', '.join((*RUN_LABELS, *labels))}) ({select(metric)})"


def firing() -> str:
    """Firing alerts of the targets chosen by the variables."""
    return f"{ALERTS.name}{{{','.join((*of_target(), where('alertstate', 'firing')))}}}"


def by_rank(metric: Metric, *matchers: str) -> str:
    """One series per rank and run."""
    return f"max by ({', '.join((*RUN_LABELS, *RANK_LABELS))}) ({select(metric, *matchers)})"


def since(metric: Metric, how: str = "max", *labels: str) -> str:
    """Seconds since the time stored in a metric, by Prometheus's clock, for each value of further labels."""
    return f"time() - {over(metric, how, *labels)}"


def per_second(metric: Metric) -> str:
    """Rate of a run's counter."""
    return f"max by ({OF_RUNS}) (rate({select(metric)}[{WINDOW}]))"


def foreign_per_second(metric: ForeignMetric, *labels: str) -> str:
    """Rate of another program's counter."""
    return f"sum by ({', '.join(labels)}) (rate({foreign(metric)}[{WINDOW}]))"


def in_order_of_ranks(expr: str) -> Query:
    """Query for a heat map with one line per rank of each run. The label `row` has four-digit ranks: 10 sorts after
    9."""
    padded = f'label_replace({expr}, "row", "000$1", "{RANK}", "(.+)")'
    return each_run(f'label_replace({padded}, "row", "$1", "row", ".*(.{{4}})")', "{{row}}")


def values_of(metric: Metric | ForeignMetric, label: str, *matchers: str) -> str:
    """Query of a variable: all values of a label."""
    name = metric.name if isinstance(metric, ForeignMetric) else prometheus_name(metric)
    return f"label_values({name}{{{','.join(matchers)}}}, {label})"
