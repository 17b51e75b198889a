"""`mqo perf`: what a mode costs and changes in training, measured and held to thresholds."""
