"""State of a run while it trains, made of its messages, and the series of it that Prometheus reads."""
