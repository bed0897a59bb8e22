"""A sweep under Ray Tune: its plan, its trials and the workers that these keep, and its record."""
