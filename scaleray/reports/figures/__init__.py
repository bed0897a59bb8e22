"""Figures of reports, one file a kind of record."""
