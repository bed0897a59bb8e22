"""Jobs of a cluster that is elsewhere: what travels to it, whether it fits, and what becomes of it."""
