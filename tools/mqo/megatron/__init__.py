"""The code that patched Megatron-LM calls: hooks, attention, losses, experts; and a simulator."""
