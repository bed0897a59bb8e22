"""Dashboards as data, and the files that Grafana and Prometheus read."""
