"""Text and tables of records, shared by all outputs."""
