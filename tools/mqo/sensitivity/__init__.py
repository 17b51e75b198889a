"""Which parts of a model quantization changes the most: `mqo sensitivity`."""
