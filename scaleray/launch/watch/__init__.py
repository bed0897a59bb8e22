"""Looking at runs while they live, without disturbing them: `scaleray watch`."""
