"""Worker side of verification: variants, their traces, and interrupted runs."""
