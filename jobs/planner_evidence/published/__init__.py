"""Measurements that other people published, read from a folder and made into questions that the planner can answer."""

from jobs.planner_evidence.published.rows import Observation, Skipped, observations, read_folder

__all__ = ["Observation", "Skipped", "observations", "read_folder"]
