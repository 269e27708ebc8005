"""The CUDA kernels on a CPU: their own sources, compiled by g++ against simt.h."""
