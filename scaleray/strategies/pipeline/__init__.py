"""Pipeline parallelism: stages, schedules, sharded stages, and evaluation."""
