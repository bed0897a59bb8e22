"""A profile and a trace as figures and pages."""
