"""`scaleray check`: one batch through a workload, before a training is started."""
