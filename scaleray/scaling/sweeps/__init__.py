"""Search spaces and results of sweeps."""
