"""A run while it trains: its state, metrics page, alerts, dashboards, and how a person watches it."""
