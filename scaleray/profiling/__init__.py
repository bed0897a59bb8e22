"""Arithmetic of profiles: from what workers measured to where the time went. Numpy alone, and no effects."""
