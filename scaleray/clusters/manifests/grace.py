"""Time for a stopping training to save, on each system: less than the system's own limit."""

SAVING = "SCALERAY_CHECKPOINT__GRACE_S"
"""Variable with the training's own limit (checkpoint.grace_s), after which the training ends as with Ctrl-C."""
RAY_STOP = "RAY_JOB_STOP_WAIT_TIME_S"
"""Variable of Ray: seconds from `ray job stop` to SIGKILL, read on the node that runs the job's driver."""

SLURM_S, SLURM_SAVING_S = 300, 240
"""Time from Slurm's signal to the end of a job, and the training's part of it."""
POD_S, RAY_STOP_S, SAVING_S = 120, 110, 90
"""Seconds that Kubernetes gives a pod, that Ray gives a stopped job, and that a training may use of both."""
