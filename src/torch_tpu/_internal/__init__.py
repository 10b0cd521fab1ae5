"""Import paths that published TPU kernels and PyTorch's own code expect. The API is torch.tpu.pallas."""
