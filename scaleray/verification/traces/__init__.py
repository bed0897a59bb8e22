"""The trace of a run: what is kept of it, and the comparison of two."""
