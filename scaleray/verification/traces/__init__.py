"""The trace of a run, and the comparison of two."""
