"""mqo: patches a vendored Megatron-LM structurally, runs it quantized, and reports what ran."""
