from refusal import cuda_only

multi_tensor_l2norm = cuda_only("multi_tensor_l2norm")
multi_tensor_scale = cuda_only("multi_tensor_scale")
