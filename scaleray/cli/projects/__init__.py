"""Working projects to start from: a workload, its config and its test, written by `scaleray init`."""
