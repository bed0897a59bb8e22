"""One training: `scaleray train` from a config to its record, and how it goes on after an interruption."""
