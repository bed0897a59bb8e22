"""What a plan answers: ranked layouts, the curve, ways to a target, and the config to write."""
