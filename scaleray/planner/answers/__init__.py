"""Results of a plan: ranked layouts, the curve, ways to a target, and the config to write."""
