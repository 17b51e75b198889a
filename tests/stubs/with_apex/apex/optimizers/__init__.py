from refusal import cuda_only

FusedAdam = cuda_only("FusedAdam")
FusedSGD = cuda_only("FusedSGD")
