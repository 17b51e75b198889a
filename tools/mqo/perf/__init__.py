"""`mqo perf`: measure what a mode costs and changes in training, and compare with thresholds."""
