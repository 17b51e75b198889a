"""`mqo track`, and `--tracker`: runs in Weights & Biases and MLflow."""
