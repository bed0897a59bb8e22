"""Profiles: attribution of time from the workers' measurements. Pure functions on numpy arrays, without effects."""
