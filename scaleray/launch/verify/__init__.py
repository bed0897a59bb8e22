"""Verification: which variants are compared, on which workers, and the certificate of it."""
