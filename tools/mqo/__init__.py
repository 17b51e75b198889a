"""mqo: patches a vendored Megatron-LM structurally, runs it quantised, and reports what ran."""
