from refusal import cuda_only

FusedLayerNormAffineFunction = cuda_only("FusedLayerNormAffineFunction")
