"""What is watched of a run while it lives: rules and dashboards, made of the table of metrics. Arithmetic alone."""
