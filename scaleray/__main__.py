"""`python -m scaleray`, which works where the console script is not on the path, as in submitted jobs."""

from scaleray.cli import main

main()
