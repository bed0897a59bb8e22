"""The files of `cluster/`: one table of versions and sizes, templates, and checks of the files."""
