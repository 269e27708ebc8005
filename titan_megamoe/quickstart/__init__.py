"""The quickstart: train a small Qwen3-MoE through TorchTitan on any machine, beside stock
TorchTitan.

    python -m titan_megamoe.quickstart
"""
