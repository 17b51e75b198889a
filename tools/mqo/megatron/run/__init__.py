"""Write the records of a run, and check a training and its checkpoints."""
