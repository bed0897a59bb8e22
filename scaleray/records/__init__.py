"""Immutable results that are sent between processes and written to files. Independent of torch and Ray."""
