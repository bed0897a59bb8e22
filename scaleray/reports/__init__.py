"""Reports that people read: pages, figures and views on the terminal."""
