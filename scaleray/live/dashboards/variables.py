"""Variables above the panels. They are identical on all dashboards, so that links can pass them on."""

from scaleray.common import live_metrics, metric_names
from scaleray.live import foreign
from scaleray.live.dashboards.panels import Link, Note, Variable
from scaleray.live.dashboards.queries import NODE, RANK, RUN_ID, RUN_NAME, as_scraped, firing, once, values_of

DATASOURCE = Variable(name="datasource", label="Data source", query="prometheus", kind="datasource")
JOB = Variable(
    name="job",
    label="Job",
    query=values_of(foreign.UP, "job"),
    description="Prometheus job that scrapes the runs; Ray's own service discovery file names it ray.",
    all_value=".+",
)
INSTANCE = Variable(
    name="instance",
    label="Instance",
    query=values_of(foreign.UP, "instance", 'job=~"$job"'),
    description="Scraped address: one per node with Ray, one per run without Ray.",
    all_value=".+",
)
RUN = Variable(name="run", label="Run", query=values_of(live_metrics.RUN_INFO, RUN_NAME, 'job=~"$job"'))
ID = Variable(
    name=RUN_ID,
    label="Run id",
    query=values_of(live_metrics.RUN_INFO, RUN_ID, 'job=~"$job"', f'{RUN_NAME}=~"$run"'),
    description="Distinguishes runs of the same name.",
)
OF_RANK = Variable(
    name=RANK, label="Rank", query=values_of(metric_names.STEP_TIME_S, RANK, 'job=~"$job"', f'{RUN_NAME}=~"$run"')
)
OF_NODE = Variable(
    name=NODE,
    label="Node",
    query=values_of(metric_names.STEP_TIME_S, NODE, 'job=~"$job"', f'{RUN_NAME}=~"$run"'),
    description="Address of a node as Ray knows it.",
)
NODE_OF_RAY = Variable(
    name=NODE,
    label="Node",
    query=values_of(foreign.NODE_CPU, foreign.NODE_CPU.node_label, 'job=~"$job"'),
    description="Address of a node as Ray knows it; it does not filter GPUs, which DCGM names by host.",
)
PRICE = Variable(
    name="price",
    label="Price of a worker-hour",
    query="1",
    kind="textbox",
    description="Price of one worker for one hour, in any currency.",
)

TARGETS = (DATASOURCE, JOB, INSTANCE)
RUNS = (*TARGETS, RUN, ID)
RANKS = (*RUNS, OF_NODE, OF_RANK)

ABOUT_RUNS = (
    (RUN_NAME, "run"),
    (RUN_ID, "id"),
    *((as_scraped(label), label) for label in live_metrics.RUN_INFO.labels),
)
"""Columns of a table of runs: labels that describe a run, and their headers."""
LINK_LABELS = ("mlflow_page", "report_page", "experiment_page")
"""Labels added by `runs`: addresses in MLflow of a run's page, its report, and its experiment, as for studies and
sweeps."""
PAGES = tuple(
    Link(title, f"${{__data.fields.{label}}}")
    for title, label in zip(("MLflow", "HTML report", "Experiment, with studies and sweeps"), LINK_LABELS, strict=True)
)
"""Links from a line in a table of runs to the run's pages."""


def runs(info: str) -> str:
    """Query for the facts of each run, with page addresses as labels.

    Browsers cannot open the report's folder, so the link leads to MLflow's artifact page: the run's page with the
    artifact's path before the question mark (as in MLflow 3.17)."""
    link, expr = live_metrics.RUN_INFO.labels[0], info
    addresses = (("$1", "(.+)"), ("$1/artifactPath/report.html$2", "([^?]+)(.*)"), ("$1", "(.+/experiments/[^/]+)/.*"))
    for label, (address, pattern) in zip(LINK_LABELS, addresses, strict=True):
        expr = f'label_replace({expr}, "{label}", "{address}", "{link}", "{pattern}")'
    return expr


RESTARTED = Note(
    title="training resumed after a loss",
    expr=f"changes({once(live_metrics.RESTARTS)}[$__interval:]) > 0",
    text=f"{{{{{RUN_NAME}}}}}",
    colour="orange",
)
FIRING = Note(title="alert", expr=firing(), text="{{alertname}} {{ray_train_run_name}} {{rank}}", colour="red")
