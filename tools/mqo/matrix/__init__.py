"""Define the matrix of models, datasets, modes and training configurations, and its scripts."""
