"""Many cells of the matrix, side by side: `mqo sweep`."""
