"""Models in the planner's form: blocks of matrix products, from a name, a shape or a counted workload."""
