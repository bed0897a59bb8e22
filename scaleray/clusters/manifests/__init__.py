"""The files of `cluster/`: one table of versions and sizes, templates, and what must hold of the files."""
