"""Time that a stopping training has to save on each system, which is less than the system's own limit."""

SAVING = "SCALERAY_CHECKPOINT__GRACE_S"
"""Environment variable for the training's own limit (checkpoint.grace_s), after which it ends as on Ctrl-C."""
RAY_STOP = "RAY_JOB_STOP_WAIT_TIME_S"
"""Ray's environment variable: seconds from `ray job stop` to SIGKILL, read on the node of the job's driver."""

SLURM_S, SLURM_SAVING_S = 300, 240
"""Seconds from Slurm's signal to the end of a job, and the training's part of them."""
POD_S, RAY_STOP_S, SAVING_S = 120, 110, 90
"""Seconds that Kubernetes gives a pod, that Ray gives a stopped job, and that a training may use."""
