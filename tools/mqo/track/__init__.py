"""Send runs to Weights & Biases and MLflow: `mqo track` and `--tracker`."""
