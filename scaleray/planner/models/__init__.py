"""Models as the planner sees them: blocks of matrix products, from a name, a shape or a counted workload."""
