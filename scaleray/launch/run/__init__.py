"""One training: `scaleray train` from a config to its record, and its continuation after an interruption."""
