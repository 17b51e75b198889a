"""Compare runs on a page with pictures and tables."""
