"""The page of each kind of record."""
