"""The files of dashboards and rules, and their way into a Grafana."""
