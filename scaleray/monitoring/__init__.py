"""Monitoring of a run while it trains: rules and dashboards, made of the table of metrics. Arithmetic alone."""
