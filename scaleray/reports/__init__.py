"""Reports for readers: pages, figures and views on the terminal."""
