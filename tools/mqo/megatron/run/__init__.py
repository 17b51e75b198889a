"""What a run writes into its folder, and the checks of a training and of its checkpoints."""
