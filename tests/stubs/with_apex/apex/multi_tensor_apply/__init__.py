from refusal import cuda_only

multi_tensor_applier = cuda_only("multi_tensor_applier")
