"""Figures and pages of profiles and traces."""
