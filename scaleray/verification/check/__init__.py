"""`scaleray check`: run one batch through a workload before training it."""
