"""The rules of all alerts: cost, remedy, a query for Prometheus and a predicate for one run."""
