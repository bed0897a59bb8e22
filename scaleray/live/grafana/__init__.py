"""Files of dashboards and rules, and their import into Grafana."""
