"""State of a run while it trains, built from its messages, and its series for Prometheus."""
