"""The adapter for TorchTitan 0.3: the same op, options and numbers as under 0.2."""
