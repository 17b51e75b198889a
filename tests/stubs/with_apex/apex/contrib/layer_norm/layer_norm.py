from refusal import cuda_only

FastLayerNormFN = cuda_only("FastLayerNormFN")
