"""How good the planner is: published measurements, the fit of its constants, and its errors."""
