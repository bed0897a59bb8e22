"""The alert rules, each with its cost, its remedy, a query for Prometheus, and a predicate for one run if possible."""
