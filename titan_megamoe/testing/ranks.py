"""A pool of worker processes that form a process group: multi-rank tests without a launcher.

    with RankPool(2, "cpu") as pool:
        results = pool.run(function, argument)      # function(rank, argument) on both ranks

A pool outlives many calls, so that a test pays no process start. A call that takes longer than its limit
kills the pool and raises: a hang is a failure, not a wait.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class RankError(RuntimeError):
    """A rank raised; the message holds every rank's traceback."""


worker_device = torch.device("cpu")
"""Where a worker of a pool computes; set when it starts."""


class RankPool:
    """`world` processes, one group.

    device: "cpu" (gloo), "cuda" (NCCL, rank r on GPU r) or "cuda-shared" (gloo, rank r on GPU r modulo their
    number: more ranks than GPUs. Ranks of one GPU take turns on it, so that every wait between them costs
    milliseconds).
    """

    def __init__(self, world: int, device: str = "cpu", timeout_s: float = 120.0) -> None:
        self.world, self.device, self.timeout_s = world, device, timeout_s
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[multiprocessing.connection.Connection] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        per_rank: list[Any] | None = None,
    ) -> list[Any]:
        """`function(rank, *args)` on every rank; results in rank order.

        `function` is a module-level function; `per_rank[r]`, if given, is passed to rank r in front of
        `args`. Raises RankError with the tracebacks if any rank raised, TimeoutError on a hang.
        """
        self._start()
        for rank, pipe in enumerate(self._pipes):
            own = () if per_rank is None else (per_rank[rank],)
            pipe.send((function, own + args))
        limit = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        answers: list[Any] = [None] * self.world
        waiting = dict(zip(self._pipes, range(self.world), strict=True))
        while waiting:
            ready = multiprocessing.connection.wait(
                list(waiting), timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                ranks = sorted(waiting.values())
                self.close()
                raise TimeoutError(f"ranks {ranks} of {self.world} did not answer within {limit:g} s")
            for pipe in [p for p in self._pipes if p in ready]:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    self.close()
                    raise RankError(f"rank {rank} of {self.world} died") from None
        failed = [f"--- rank {r} ---\n{text}" for r, (ok, text) in enumerate(answers) if not ok]
        if failed:
            self.close()  # ranks may be out of step; the next run starts fresh ones
            raise RankError("\n".join(failed))
        return [value for _, value in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        if self._processes:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["titan_megamoe.testing.ranks", "titan_megamoe.op"])
        port = _free_port()
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.world, self.device, port), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(
    pipe: multiprocessing.connection.Connection, rank: int, world: int, device: str, port: int
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    global worker_device
    if device == "cuda":
        worker_device = torch.device("cuda", rank)
        torch.cuda.set_device(worker_device)
        dist.init_process_group("nccl", device_id=worker_device)
    else:
        if device == "cuda-shared":
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
            worker_device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(worker_device)
        dist.init_process_group("gloo")
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)  # the parent closed the pool; peers may be gone, so no orderly shutdown
        try:
            answer = (True, function(rank, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            pipe.send(answer)
        except Exception:  # what cannot be pickled
            pipe.send((False, traceback.format_exc()))
