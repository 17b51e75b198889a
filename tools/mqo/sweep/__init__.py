"""`mqo sweep`: trains many runs side by side."""
