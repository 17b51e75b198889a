"""The matrix: models x datasets x modes x training configurations, and the scripts made of it."""
