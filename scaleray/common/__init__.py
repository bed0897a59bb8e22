"""Helpers that import no other room."""
