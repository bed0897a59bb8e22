"""Dashboard to open first: health, speed, progress and remaining time of a run."""

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.live.dashboards import variables
from scaleray.live.dashboards.panels import Dashboard, Panel, Query, Row, Threshold
from scaleray.live.dashboards.queries import OF_RUNS, each_run, firing, once, over, per_second, select, since, so_far

BELOW = float("-inf")

NOW = Row(
    "Now",
    (
        Panel(
            title="State",
            description="Normal: running, then finished. Failed: the run's terminal, or `failure` of its record.json, "
            "has the reason; `scaleray train --resume RUN_FOLDER` continues it.",
            queries=(each_run(f"2 * {once(live.RUN_FAILED)} + {once(live.RUN_FINISHED)}"),),
            unit="none",
            kind="stat",
            words=(("0", "running", "blue"), ("1", "finished", "green"), ("2", "failed", "red")),
            width=4,
            height=5,
        ),
        Panel(
            title="Alerts firing",
            description="Normal: 0. Each alert says what it costs and what to do; Prometheus lists them under Alerts.",
            queries=(Query(f"count({firing()}) or vector(0)", "alerts"),),
            unit="none",
            kind="stat",
            thresholds=(Threshold(1, "red"),),
            width=4,
            height=5,
        ),
        Panel(
            title="Progress",
            description="Steps done of those planned. A target or an early stop may end the run before 100 %.",
            queries=(each_run(f"{once(live.STEPS)} / {once(live.STEPS_PLANNED)}"),),
            unit="percentunit",
            kind="gauge",
            minimum=0,
            maximum=1,
            thresholds=(Threshold(BELOW, "blue"),),
            width=4,
            height=5,
        ),
        Panel(
            title="Time left",
            description="Steps left at the time that the slowest rank's step takes now; evaluations and checkpoints "
            "come on top. Where it grows, see Step time.",
            queries=(
                each_run(f"({once(live.STEPS_PLANNED)} - {once(live.STEPS)}) * {over(names.STEP_TIME_S, 'max')}"),
            ),
            unit="dtdurations",
            kind="stat",
            thresholds=(Threshold(BELOW, "blue"),),
            width=4,
            height=5,
        ),
        Panel(
            title="Time since the last step",
            description="For the rank that is furthest behind. Normal: about the time of a step, or more during work "
            "outside steps. Otherwise, minutes mean a hang; its failure will name the ranks that did not arrive.",
            queries=(each_run(since(live.LAST_STEP_TIMESTAMP_S, "min")),),
            unit="s",
            kind="stat",
            thresholds=(Threshold(60, "orange"), Threshold(300, "red")),
            width=4,
            height=5,
        ),
        Panel(
            title="Goodput",
            description="Share of the run's time, over all attempts, spent in steps that count. Normal: above 90 % "
            "after the first minutes. Low: see Restarts, Steps repeated and the checkpoints.",
            queries=(each_run(once(names.GOODPUT)),),
            unit="percentunit",
            kind="stat",
            minimum=0,
            maximum=1,
            thresholds=(Threshold(BELOW, "red"), Threshold(0.7, "orange"), Threshold(0.9, "green")),
            width=4,
            height=5,
        ),
    ),
)

SPEED = Row(
    "How fast",
    (
        Panel(
            title="Throughput",
            description="Samples a second of all workers, and the rate that the study or planner expects, if the "
            "config has it. Normal: flat, and within 10 % of what is expected. A fall: see Where the time goes.",
            queries=(each_run(once(names.SAMPLES_PER_S)), each_run(once(live.EXPECTED_SAMPLES_PER_S), "expected")),
            unit="short",
            minimum=0,
        ),
        Panel(
            title="Throughput over prediction",
            description="Normal: 0.9 and above. Below: a cause that the study did not measure: a slow rank or "
            "link (dashboard Ranks), the input, throttled GPUs (dashboard Cluster).",
            queries=(each_run(once(live.EFFICIENCY_OVER_PREDICTION)),),
            unit="percentunit",
            needs="prediction",
            minimum=0,
            thresholds=(Threshold(BELOW, "red"), Threshold(0.8, "orange"), Threshold(0.9, "green")),
        ),
        Panel(
            title="Tokens a second",
            description="Of all workers, where the workload counts its loss by tokens. Normal: flat.",
            queries=(each_run(once(names.TOKENS_PER_S)),),
            unit="short",
            needs="tokens",
            minimum=0,
        ),
        Panel(
            title="Step time",
            description="Of the slowest and the fastest rank. Normal in synchronous training: equal, as all wait for "
            "the last one. The lateness on the dashboard Ranks shows which rank that is.",
            queries=(
                each_run(over(names.STEP_TIME_S, "max"), "slowest"),
                each_run(over(names.STEP_TIME_S, "min"), "fastest"),
            ),
            unit="s",
            minimum=0,
        ),
        Panel(
            title="Where the time goes",
            description="Parts of a step, the mean of all ranks. Normal: forward and backward are most of it. Input "
            "large: more input tasks or a faster store. Communication large: larger batches or buckets, compression. "
            "`scaleray profile RUN` names the limiting one and the gain of removing it.",
            queries=(each_run(f"avg by ({OF_RUNS}, phase) ({select(live.PHASE_S)})", "{{phase}}"),),
            unit="s",
            is_stacked=True,
            minimum=0,
        ),
        Panel(
            title="Input",
            description="Share of a step that rank 0 waited for its rows. Normal: below 5 %. Above: more CPUs for "
            "input tasks, a nearer store, or less work in transform and collate.",
            queries=(each_run(once(names.INPUT_WAIT_SHARE)),),
            unit="percentunit",
            minimum=0,
        ),
        Panel(
            title="Exposed communication",
            description="Share of a step that ranks waited for communication. Normal: as in the study. "
            "More: a late rank or a slow link, on the dashboard Ranks.",
            queries=(each_run(once(live.EXPOSED_COMMUNICATION_SHARE)),),
            unit="percentunit",
            minimum=0,
        ),
        Panel(
            title="Sent to collectives",
            description="Bytes a second that rank 0 gave to collectives. Normal: flat; it falls with compression and "
            "with meetings that are further apart.",
            queries=(each_run(per_second(live.SENT_BYTES_TOTAL)),),
            unit="Bps",
            minimum=0,
        ),
        Panel(
            title="Model FLOPs utilisation",
            description="Model FLOPs a second over the peak of the devices. Empty: the peak is unknown, as for CPUs "
            "and GPUs that the catalogue lacks (set study.peak_tflops), or the FLOPs of a sample could not be "
            "counted (the run's events have the reason). Normal for large language models: 35 to 55 %. Low with "
            "nothing waiting: small kernels; `scaleray profile -c FILE --trace` names the modules.",
            queries=(each_run(once(live.MFU)),),
            unit="percentunit",
            needs="GPU",
            minimum=0,
        ),
        Panel(
            title="Outside steps",
            description="Seconds since the first worker last evaluated, saved, compiled or ended, within the last "
            "half hour. Normal: near 0 during such a phase, in which no step ends; this is not a hang.",
            queries=(each_run(f"{since(live.LONG_PHASE_TIMESTAMP_S, 'max', 'phase')} < 1800", "{{phase}}"),),
            unit="s",
            needs="long phase",
            minimum=0,
        ),
        Panel(
            title="Workers",
            description="Normal: constant, or as the scheduler gives them in an elastic run.",
            queries=(each_run(once(names.WORKERS)),),
            unit="none",
            minimum=0,
            decimals=0,
        ),
    ),
)

LEARNING = Row(
    "Is it learning",
    (
        Panel(
            title="Loss",
            description="Of the global batch. Normal: falling, with noise. A spike that does not come back: lower "
            "the learning rate, or check the data of that step.",
            queries=(each_run(once(names.LOSS)),),
            unit="none",
        ),
        Panel(
            title="Evaluation",
            description="Last values of the evaluations, by split and metric. A loss that rises while the training's "
            "falls is overfitting.",
            queries=(each_run(once(live.EVAL, "split", "metric"), "{{split}}/{{metric}}"),),
            unit="none",
        ),
        Panel(
            title="Gradient norm",
            description="Before clipping. Normal: within a factor of a few of its past. Growing by orders of "
            "magnitude: the training diverges; clip, or lower the learning rate.",
            queries=(each_run(once(names.GRAD_NORM)),),
            unit="none",
            minimum=0,
        ),
        Panel(
            title="Learning rate",
            description="As the schedule has it. Normal: warm-up, then decay.",
            queries=(each_run(once(names.LEARNING_RATE)),),
            unit="sci",
            minimum=0,
        ),
        Panel(
            title="Epochs",
            description="Passes over the training data. Normal: a straight line. Flat pieces: evaluations, "
            "checkpoints, or lost time.",
            queries=(each_run(once(names.EPOCH)),),
            unit="none",
            minimum=0,
        ),
        Panel(
            title="Loss scale",
            description="Of fp16. Normal: halved now and then, and back up. Falling without end: gradients overflow "
            "at every step; use bf16.",
            queries=(each_run(once(names.LOSS_SCALE)),),
            unit="none",
            needs="fp16",
        ),
        Panel(
            title="Steps that were not finite",
            description="Steps whose loss or gradient was NaN or infinite, so far. Normal: 0, or a few with fp16. The "
            "run's log names the row of the data that holds them.",
            queries=(each_run(so_far(names.NONFINITE_STEPS)),),
            unit="none",
            minimum=0,
            decimals=0,
        ),
    ),
)

SAFETY = Row(
    "What could be lost",
    (
        Panel(
            title="Age of the newest checkpoint",
            description="Training time that an interruption would lose now, the checkpoint interval, and the write "
            "time of the newest checkpoint. Normal: a sawtooth below the sum of the last two. Growing: checkpoints "
            "fail; see the run's log and the disk.",
            queries=(
                each_run(once(live.CHECKPOINT_AGE_S), "age"),
                each_run(once(live.CHECKPOINT_INTERVAL_S), "interval"),
                each_run(once(names.CHECKPOINT_DURATION_S), "writing"),
            ),
            unit="s",
            minimum=0,
        ),
        Panel(
            title="Restarts",
            description="How often the training resumed after losing workers. Normal: 0 on your own machines. "
            "Repeated: the run's log names the node and the reason.",
            queries=(each_run(so_far(live.RESTARTS)),),
            unit="none",
            minimum=0,
            decimals=0,
        ),
        Panel(
            title="Steps repeated",
            description="Steps repeated after a loss of workers or a resume. Normal: below the steps from "
            "one checkpoint to the next, for each restart; checkpoint.every makes them fewer.",
            queries=(each_run(so_far(live.STEPS_REPEATED)),),
            unit="none",
            minimum=0,
            decimals=0,
        ),
        Panel(
            title="Memory of the fullest rank",
            description="By kind. Normal: flat after the first steps. Creeping up: something keeps tensors; "
            "`scaleray profile -c FILE --memory` names what holds them.",
            queries=(each_run(once(live.MEMORY_BYTES, "kind"), "{{kind}}"),),
            unit="bytes",
            minimum=0,
        ),
        Panel(
            title="Free disk",
            description="Of the disk with the run's folder, on the driver's machine. Normal: above 10 %. Full: "
            "`scaleray checkpoint prune`, or another checkpoint.storage_path.",
            queries=(each_run(once(live.DISK_FREE)),),
            unit="percentunit",
            minimum=0,
            maximum=1,
            thresholds=(Threshold(BELOW, "red"), Threshold(0.05, "orange"), Threshold(0.1, "green")),
        ),
        Panel(
            title="Points that wait for MLflow",
            description="Normal: 0, or briefly a few. Growing: the server is away; nothing is lost, and "
            "`scaleray tracking replay` sends it later.",
            queries=(each_run(once(live.RECORDER_SPOOLED_POINTS)),),
            unit="none",
            minimum=0,
            decimals=0,
        ),
        Panel(
            title="Which runs",
            description="Facts of each run. A click on a line opens its page in MLflow, or its HTML report there.",
            queries=(Query(variables.runs(select(live.RUN_INFO))),),
            unit="none",
            kind="table",
            columns=variables.ABOUT_RUNS,
            links=variables.PAGES,
            links_from=variables.LINK_LABELS,
        ),
    ),
)

DASHBOARD = Dashboard(
    name="run",
    title="scaleray: run",
    description="Health, speed, progress and time left of a run.",
    variables=variables.RANKS,
    rows=(NOW, SPEED, LEARNING, SAFETY),
    notes=(variables.FIRING, variables.RESTARTED),
)
