"""Write the dashboard and rule files, and import them into Grafana."""
