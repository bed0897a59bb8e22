"""Seeds, and the fingerprint of the environment that a result came from."""
