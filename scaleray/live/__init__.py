"""A running training: its state, metrics page, alerts and dashboards, and displays for the user."""
