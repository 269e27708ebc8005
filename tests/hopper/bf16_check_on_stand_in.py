"""Run by test_bf16_check.py in a process of its own: scripts/bf16_check.py from end to end without a GPU.

As fp8_check_on_stand_in.py: no kernel runs, every time is 1 ms, so what is checked comes out wrong.
"""

from __future__ import annotations

import sys

import fp8_check_on_stand_in as stand_in


class Inline:
    """A pool of processes that has none."""

    def __init__(self, *_: object) -> None: ...
    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *_: object) -> None: ...
    def map_async(self, function, jobs, chunksize):
        found = [function(job) for job in jobs]
        return type("Result", (), {"get": lambda self: found})()


def main() -> int:
    patch = stand_in.stand_in_for_gpu()
    import bf16_check
    import fp8_check

    models = {"30b": (256, 128), "235b": (192, 136)}
    for module, name, value in (
        (fp8_check, "EXPERTS", 16), (fp8_check, "TOP_K", 4), (fp8_check, "TOKENS", 256),
        (bf16_check, "TOKENS", 256), (fp8_check, "ROUNDS", 2), (bf16_check, "MODELS", models),
        (bf16_check, "SMALL", [(256, 384, [44, 0, 129])]), (bf16_check, "compile_all", lambda: None),
        (bf16_check.multiprocessing, "get_context", lambda _: type("Context", (), {"Pool": Inline})),
    ):  # fmt: skip
        patch.setattr(module, name, value)
    with stand_in.OnCpu():
        return bf16_check.main()


if __name__ == "__main__":
    sys.exit(main())
