"""Arithmetic of scaling: rules, schedules and the recipe derived from a config. No torch, no Ray, no I/O."""
