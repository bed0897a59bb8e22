"""Profiles: attribution of a run's time, from the workers' measurements. Pure functions on numpy arrays."""
