"""A plan as text, tables, figures and a page."""
