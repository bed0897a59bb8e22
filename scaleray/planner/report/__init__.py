"""A plan as text, table, figure and page."""
