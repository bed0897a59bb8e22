"""The dashboard to open first: health, speed, progress and remaining time of a run."""

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
            description="Normal: running, then finished. If it failed, the run's terminal or `failure` in its "
            "record.json has the reason; `scaleray train --resume RUN_FOLDER` continues it.",
            queries=(each_run(f"2 * {once(live.RUN_FAILED)} + {once(live.RUN_FINISHED)}"),),
            unit="none",
            kind="stat",
            words=(("0", "running", "blue"), ("1", "finished", "green"), ("2", "failed", "red")),
            width=4,
            height=5,
        ),
        Panel(
            title="Alerts firing",
            description="Normal: 0. Prometheus lists the alerts under Alerts, each with its cost and its remedy.",
            queries=(Query(f"count({firing()}) or vector(0)", "alerts"),),
            unit="none",
            kind="stat",
            thresholds=(Threshold(1, "red"),),
            width=4,
            height=5,
        ),
        Panel(
            title="Progress",
            description="Finished share of the planned steps. A target or an early stop may end the run before 100 %.",
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
            description="Remaining steps times the current step time of the slowest rank, without evaluations and "
            "checkpoints. If it grows, see Step time.",
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
            description="For the rank that is furthest behind. Normal: about one step time, or more during work "
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
            "after the first minutes. If it is low, see Restarts, Steps repeated and the checkpoints.",
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
            description="Samples per second of all workers, and the rate expected by the study or planner, if the "
            "config has it. Normal: constant, and within 10 % of the expected rate. If it falls, see Where the time "
            "goes.",
            queries=(each_run(once(names.SAMPLES_PER_S)), each_run(once(live.EXPECTED_SAMPLES_PER_S), "expected")),
            unit="short",
            minimum=0,
        ),
        Panel(
            title="Throughput over prediction",
            description="Normal: 0.9 and above. A lower value has a cause that the study did not measure: a slow rank "
            "or link (dashboard Ranks), the input, or throttled GPUs (dashboard Cluster).",
            queries=(each_run(once(live.EFFICIENCY_OVER_PREDICTION)),),
            unit="percentunit",
            needs="prediction",
            minimum=0,
            thresholds=(Threshold(BELOW, "red"), Threshold(0.8, "orange"), Threshold(0.9, "green")),
        ),
        Panel(
            title="Tokens a second",
            description="Total of all workers, if the workload averages its loss over tokens. Normal: constant.",
            queries=(each_run(once(names.TOKENS_PER_S)),),
            unit="short",
            needs="tokens",
            minimum=0,
        ),
        Panel(
            title="Step time",
            description="Step times of the slowest and the fastest rank. Normal in synchronous training: equal, as all "
            "wait for the last one. Lateness on the dashboard Ranks shows which rank that is.",
            queries=(
                each_run(over(names.STEP_TIME_S, "max"), "slowest"),
                each_run(over(names.STEP_TIME_S, "min"), "fastest"),
            ),
            unit="s",
            minimum=0,
        ),
        Panel(
            title="Where the time goes",
            description="Parts of a step, averaged over all ranks. Normal: forward and backward take most of it. If "
            "input is large, use more input tasks or faster storage. If communication is large, use larger batches or "
            "buckets, or compression. `scaleray profile RUN` names the limiting part and the gain from removing it.",
            queries=(each_run(f"avg by ({OF_RUNS}, phase) ({select(live.PHASE_S)})", "{{phase}}"),),
            unit="s",
            is_stacked=True,
            minimum=0,
        ),
        Panel(
            title="Input",
            description="Share of a step that rank 0 spent waiting for its rows. Normal: below 5 %. If it is higher, "
            "use more CPUs for input tasks, storage that is closer, or less work in transform and collate.",
            queries=(each_run(once(names.INPUT_WAIT_SHARE)),),
            unit="percentunit",
            minimum=0,
        ),
        Panel(
            title="Exposed communication",
            description="Share of a step that ranks spent waiting for communication. Normal: as in the study. If it is "
            "higher, look for a late rank or a slow link on the dashboard Ranks.",
            queries=(each_run(once(live.EXPOSED_COMMUNICATION_SHARE)),),
            unit="percentunit",
            minimum=0,
        ),
        Panel(
            title="Sent to collectives",
            description="Bytes per second that rank 0 passed to collectives. Normal: constant; it is lower with "
            "compression and with less frequent synchronisation.",
            queries=(each_run(per_second(live.SENT_BYTES_TOTAL)),),
            unit="Bps",
            minimum=0,
        ),
        Panel(
            title="Model FLOPs utilisation",
            description="Model FLOPs per second relative to the peak of the devices. It is empty if the peak is "
            "unknown, as for CPUs and GPUs missing from the catalogue (set study.peak_tflops), or if the FLOPs of a "
            "sample could not be counted (the run's events have the reason). Normal for large language models: 35 to "
            "55 %. If it is low though nothing waits, kernels are small; `scaleray profile -c FILE --trace` names the "
            "modules.",
            queries=(each_run(once(live.MFU)),),
            unit="percentunit",
            needs="GPU",
            minimum=0,
        ),
        Panel(
            title="Outside steps",
            description="Seconds since the first worker last evaluated, saved, compiled or shut down, within the last "
            "half hour. Normal: near 0 during such a phase: no step ends in it, and this is not a hang.",
            queries=(each_run(f"{since(live.LONG_PHASE_TIMESTAMP_S, 'max', 'phase')} < 1800", "{{phase}}"),),
            unit="s",
            needs="long phase",
            minimum=0,
        ),
        Panel(
            title="Workers",
            description="Normal: constant, or as many as the scheduler grants in an elastic run.",
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
            description="Loss of the global batch. Normal: it falls, with noise. If it does not recover from a spike, "
            "lower the learning rate or check the data of that step.",
            queries=(each_run(once(names.LOSS)),),
            unit="none",
        ),
        Panel(
            title="Evaluation",
            description="Latest values of the evaluations, by split and metric. An evaluation loss that rises while "
            "the training loss falls means overfitting.",
            queries=(each_run(once(live.EVAL, "split", "metric"), "{{split}}/{{metric}}"),),
            unit="none",
        ),
        Panel(
            title="Gradient norm",
            description="Norm before clipping. Normal: within a small factor of its past values. If it grows by orders "
            "of magnitude, the training diverges: clip gradients or lower the learning rate.",
            queries=(each_run(once(names.GRAD_NORM)),),
            unit="none",
            minimum=0,
        ),
        Panel(
            title="Learning rate",
            description="Set by the schedule. Normal: warm-up, then decay.",
            queries=(each_run(once(names.LEARNING_RATE)),),
            unit="sci",
            minimum=0,
        ),
        Panel(
            title="Epochs",
            description="Passes over the training data. Normal: a straight line. Flat segments are evaluations, "
            "checkpoints or lost time.",
            queries=(each_run(once(names.EPOCH)),),
            unit="none",
            minimum=0,
        ),
        Panel(
            title="Loss scale",
            description="Loss scale of fp16. Normal: it is halved now and then, and recovers. If it keeps falling, "
            "gradients overflow at every step: use bf16.",
            queries=(each_run(once(names.LOSS_SCALE)),),
            unit="none",
            needs="fp16",
        ),
        Panel(
            title="Non-finite steps",
            description="Number of steps so far with a NaN or infinite loss or gradient. Normal: 0, or a few with "
            "fp16. The run's log names the data row that caused them.",
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
            "time of the newest checkpoint. Normal: a sawtooth below the sum of the last two. If it keeps growing, "
            "checkpoints fail: see the run's log and the disk.",
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
            description="Number of times the training resumed after losing workers. Normal: 0 on your own machines. "
            "After repeated restarts, see the run's log for the node and the reason.",
            queries=(each_run(so_far(live.RESTARTS)),),
            unit="none",
            minimum=0,
            decimals=0,
        ),
        Panel(
            title="Steps repeated",
            description="Steps repeated after a loss of workers or a resume. Normal: at each restart, fewer than the "
            "steps between two checkpoints; a smaller checkpoint.every reduces them.",
            queries=(each_run(so_far(live.STEPS_REPEATED)),),
            unit="none",
            minimum=0,
            decimals=0,
        ),
        Panel(
            title="Memory of the fullest rank",
            description="Memory by kind. Normal: constant after the first steps. If it creeps up, something keeps "
            "tensors alive; `scaleray profile -c FILE --memory` names the owner.",
            queries=(each_run(once(live.MEMORY_BYTES, "kind"), "{{kind}}"),),
            unit="bytes",
            minimum=0,
        ),
        Panel(
            title="Free disk",
            description="Free share of the disk with the run folder, on the driver's machine. Normal: above 10 %. If "
            "the disk fills up, run `scaleray checkpoint prune` or choose another checkpoint.storage_path.",
            queries=(each_run(once(live.DISK_FREE)),),
            unit="percentunit",
            minimum=0,
            maximum=1,
            thresholds=(Threshold(BELOW, "red"), Threshold(0.05, "orange"), Threshold(0.1, "green")),
        ),
        Panel(
            title="Points that wait for MLflow",
            description="Normal: 0, or briefly a few. If they grow, the server is unreachable; nothing is lost, and "
            "`scaleray tracking replay` sends them later.",
            queries=(each_run(once(live.RECORDER_SPOOLED_POINTS)),),
            unit="none",
            minimum=0,
            decimals=0,
        ),
        Panel(
            title="Which runs",
            description="Facts about each run. Click a line to open its page in MLflow, or its HTML report there.",
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
    description="Health, speed, progress and remaining time of a run.",
    variables=variables.RANKS,
    rows=(NOW, SPEED, LEARNING, SAFETY),
    notes=(variables.FIRING, variables.RESTARTED),
)
