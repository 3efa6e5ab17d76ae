"""The operations in Triton, for CUDA. Imported only for CUDA tensors, or by the tests that use Triton's interpreter."""
