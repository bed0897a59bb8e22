"""A run in progress: its state, metrics page, alerts, dashboards and displays for the user."""
