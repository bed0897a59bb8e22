"""Dashboards as data, and the files generated from them for Grafana and Prometheus."""
