"""What patched Megatron-LM calls: hooks, attention, losses, experts; and what simulates a step."""
