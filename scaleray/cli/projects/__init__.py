"""Working projects to begin with: a workload, its config and its test, written by `scaleray init`."""
