"""What tests and benchmarks compare with: the dense fp64 oracle and error measures."""
