"""The dashboard Scaling: efficiency against prediction, cost per million samples, and the runs of the last weeks."""

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.live.dashboards import variables
from scaleray.live.dashboards.panels import Dashboard, Panel, Query, Row, Threshold
from scaleray.live.dashboards.queries import OF_RUNS, each_run, once, select

BELOW = float("-inf")
OF_POINT, OF_TRIAL = names.POINT_SAMPLES_PER_S.labels, names.TRIAL_VALUE.labels
MILLION, SECONDS_AN_HOUR = "1e6", "3600"
RATE, WORKERS = once(names.SAMPLES_PER_S), once(names.WORKERS)
COST = f"$price * {WORKERS} / {SECONDS_AN_HOUR} / {RATE} * {MILLION}"

PREDICTION = Row(
    "Efficiency against prediction",
    (
        Panel(
            title="Measured over predicted",
            description="Throughput relative to the expectation of a study or the planner "
            "(monitoring.expected_samples_per_s). Normal: 0.9 to 1.1. If it is lower, `scaleray compare` with the "
            "study's run names the part of a step that grew.",
            queries=(each_run(once(live.EFFICIENCY_OVER_PREDICTION)),),
            unit="percentunit",
            needs="prediction",
            minimum=0,
            thresholds=(Threshold(BELOW, "red"), Threshold(0.8, "orange"), Threshold(0.9, "green")),
            width=12,
            height=9,
        ),
        Panel(
            title="Measured and predicted",
            description="Measured and expected samples per second of all workers. Normal: the two lines of a run are "
            "within 10 %.",
            queries=(each_run(RATE, "measured"), each_run(once(live.EXPECTED_SAMPLES_PER_S), "expected")),
            unit="short",
            minimum=0,
            width=12,
            height=9,
        ),
        Panel(
            title="Samples a second and worker",
            description="Compare runs of one model on 1, 2, 4, ... workers: equal bars mean perfect scaling, and a bar "
            "divided by that of one worker is the efficiency. `scaleray study` measures it with confidence intervals.",
            queries=(each_run(f"{RATE} / {WORKERS}"),),
            unit="short",
            kind="bargauge",
            minimum=0,
            width=12,
        ),
        Panel(
            title="Shares lost to scaling",
            description="Shares of a step spent in exposed communication and waiting for input. Normal: both below 10 "
            "%. The next doubling will increase the larger one.",
            queries=(
                each_run(once(live.EXPOSED_COMMUNICATION_SHARE), "communication"),
                each_run(once(names.INPUT_WAIT_SHARE), "input"),
            ),
            unit="percentunit",
            minimum=0,
            width=12,
        ),
    ),
)

COSTS = Row(
    "Cost",
    (
        Panel(
            title="Cost of a million samples",
            description="At the price per worker-hour set above the panels. Normal: it grows slowly with the number of "
            "workers, as efficiency falls; for most purposes, a number of workers that doubles it is too large.",
            queries=(each_run(COST),),
            unit="none",
            minimum=0,
        ),
        Panel(
            title="Cost of a million samples that count",
            description="Cost divided by goodput, which includes starts, restarts and repeated steps. Normal: within "
            "10 % of the cost without these.",
            queries=(each_run(f"{COST} / ({once(names.GOODPUT)} > 0)"),),
            unit="none",
            minimum=0,
        ),
        Panel(
            title="Cost of the last hour",
            description="Total of all selected runs: workers times price times running time.",
            queries=(each_run(f"sum by ({OF_RUNS}) (avg_over_time({select(names.WORKERS)}[1h])) * $price"),),
            unit="none",
            kind="bargauge",
            minimum=0,
        ),
    ),
)

POINT_RATE, POINT_WORKERS = (once(metric, *OF_POINT) for metric in (names.POINT_SAMPLES_PER_S, names.WORLD_SIZE))
TRIAL_RATE = once(names.TRIAL_SAMPLES_PER_S, *OF_TRIAL)
POINT, TRIAL = (
    "{{mode}}, {{workers}} workers",
    "trial {{trial}}, batch {{batch_size}}, rate {{learning_rate}}, {{rule}}",
)
TRIAL_COST = f"$price * {WORKERS} / {SECONDS_AN_HOUR} * {MILLION} / on ({OF_RUNS}) group_right () {TRIAL_RATE}"

MEASURED = Row(
    "Studies and sweeps",
    (
        Panel(
            title="Turns and trials",
            description="Finished share of a study's repeats or a sweep's trials. Normal: it grows evenly. If it stops "
            "for longer than one measurement takes, its terminal shows the cause.",
            queries=(each_run(f"{once(live.MEASURED, 'kind')} / {once(live.MEASURED_PLANNED, 'kind')}", "{{kind}}"),),
            unit="percentunit",
            needs="study",
            minimum=0,
            maximum=1,
        ),
        Panel(
            title="Efficiency of points",
            description="Samples per second and worker, relative to the smallest point of the curve. Normal: above 0.8 "
            "while adding workers is worthwhile. The study's report has the confidence intervals and the bottleneck of "
            "each point.",
            queries=(each_run(once(names.POINT_EFFICIENCY, *OF_POINT), POINT),),
            unit="percentunit",
            needs="study",
            minimum=0,
            thresholds=(Threshold(BELOW, "red"), Threshold(0.6, "orange"), Threshold(0.8, "green")),
        ),
        Panel(
            title="Cost of a million samples, by point",
            description="At the price per worker-hour set above the panels. Normal: it grows as efficiency falls.",
            queries=(each_run(f"$price * {POINT_WORKERS} / {SECONDS_AN_HOUR} / {POINT_RATE} * {MILLION}", POINT),),
            unit="none",
            needs="study",
            minimum=0,
        ),
        Panel(
            title="Throughput and step time of points",
            description="Samples per second of all workers, and the median step time in seconds. Normal: as in an "
            "earlier study under the same conditions; `scaleray compare` shows whether a difference exceeds the noise.",
            queries=(
                each_run(POINT_RATE, f"samples/s, {POINT}"),
                each_run(once(names.POINT_STEP_TIME_S, *OF_POINT), f"step time, {POINT}"),
            ),
            unit="short",
            needs="study",
            minimum=0,
        ),
        Panel(
            title="Trials",
            description="Last value of the sweep's metric for each trial, at most the newest 200. Normal: a valley or "
            "a hill over learning rates; the report shows it by batch size and rule.",
            queries=(each_run(once(names.TRIAL_VALUE, *OF_TRIAL), TRIAL),),
            unit="none",
            needs="sweep",
        ),
        Panel(
            title="Cost of a million samples, by trial",
            description="At the price set above. Concurrent trials share a machine: compare their costs only with each "
            "other. Normal: lower for larger batches, until the device is full.",
            queries=(each_run(TRIAL_COST, TRIAL),),
            unit="none",
            needs="sweep",
            minimum=0,
        ),
        Panel(
            title="Samples to the target, by trial",
            description="Data used by each batch size and learning rate. Normal: constant up to the critical batch "
            "size, then growing.",
            queries=(each_run(once(names.TRIAL_SAMPLES_TO_TARGET, *OF_TRIAL), TRIAL),),
            unit="short",
            needs="target",
            minimum=0,
        ),
    ),
)

HISTORY = Row(
    "Runs in the time range",
    (
        Panel(
            title="Throughput, run by run",
            description="Mean of each run in the time range. Choose 30 days to see whether a model has become slower; "
            "`scaleray compare RUN RUN` shows whether a difference exceeds the noise.",
            queries=(each_run(f"max by ({OF_RUNS}) (avg_over_time({select(names.SAMPLES_PER_S)}[$__range]))"),),
            unit="short",
            kind="bargauge",
            minimum=0,
            width=12,
        ),
        Panel(
            title="Runs and their settings",
            description="Every run, study and sweep in the time range, with its strategy and job. Click a line for "
            "links to its page and its experiment in MLflow. Prometheus stores 15 days by default.",
            queries=(Query(variables.runs(f"last_over_time({select(live.RUN_INFO)}[$__range])")),),
            unit="none",
            kind="table",
            columns=variables.ABOUT_RUNS,
            links=variables.PAGES,
            links_from=variables.LINK_LABELS,
            width=12,
        ),
        Panel(
            title="Last loss, run by run",
            description="Last loss of each run in the time range. Compare only runs of one model and batch size.",
            queries=(each_run(f"max by ({OF_RUNS}) (last_over_time({select(names.LOSS)}[$__range]))"),),
            unit="none",
            kind="bargauge",
            width=12,
        ),
        Panel(
            title="Evaluation, run by run",
            description="The last value of each evaluation in the time range.",
            queries=(
                each_run(
                    f"max by ({OF_RUNS}, split, metric) (last_over_time({select(live.EVAL)}[$__range]))",
                    "{{split}}/{{metric}}",
                ),
            ),
            unit="none",
            kind="bargauge",
            width=12,
        ),
    ),
)

DASHBOARD = Dashboard(
    name="scaling",
    title="scaleray: scaling",
    description="Efficiency compared with the prediction, cost, studies and sweeps, and the runs of the last weeks.",
    variables=(*variables.RUNS, variables.PRICE),
    rows=(PREDICTION, COSTS, MEASURED, HISTORY),
    notes=(variables.FIRING,),
)
