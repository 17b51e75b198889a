"""Train many runs in parallel: `mqo sweep`."""
