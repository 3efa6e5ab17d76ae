"""The operations for CUDA in Triton. Imported where a CUDA tensor comes, or by the tests of Triton's interpreter."""
