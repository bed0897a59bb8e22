"""The rules of all alerts: what each costs and what to do, as a query for Prometheus and as a predicate for one run."""
