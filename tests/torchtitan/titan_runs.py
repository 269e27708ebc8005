"""Run inside torchrun: TorchTitan's own trainer, several jobs one after another in one process group.

    torchrun --nproc-per-node W titan_runs.py <suite> <folder with assets> <result.json>

A suite is one or more functions that make runs and return plain values; rank 0 writes them. The tests in
test_parity.py judge. All runs of a suite share one start of the processes, which is most of the cost.
"""

from __future__ import annotations

import dataclasses
import time
import types
from pathlib import Path
from typing import Any

import torch

from titan_megamoe.torchtitan import cpu_shim

cpu_shim.apply()

import torch.distributed as dist  # noqa: E402
import torchtitan.train as titan_train  # noqa: E402
from shared_runs import (  # noqa: E402
    CALM,
    count_forwards,
    layout,
    made_once,
    main,
    options_of,
    train,
)
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torchtitan.components.optimizer import (  # noqa: E402
    build_optimizers_with_moe_load_balancing,
)
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.models import qwen3  # noqa: E402
from torchtitan.models.moe import MoE, MoEArgs  # noqa: E402
from torchtitan.protocols import train_spec  # noqa: E402

from titan_megamoe.torchtitan import register  # noqa: E402
from titan_megamoe.torchtitan.moe import MegaMoE  # noqa: E402

STEPS = 8
FORCED = "--debug.moe_force_load_balance"
"""TorchTitan's switch for routing in turn: rounding cannot change the choice of an expert at all."""
DIRECT = "--mega_moe.direct_experts"

# Rank 0 sleeps two seconds after every training, which a dozen short runs need not.
titan_train.time = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)

register()
qwen3.qwen3_args["tiny"] = qwen3.Qwen3ModelArgs(
    vocab_size=512,
    max_seq_len=512,
    head_dim=16,
    dim=64,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    qk_norm=True,
    hidden_dim=128,
    moe_enabled=True,
    moe_inter_dim=96,
    moe_args=MoEArgs(
        num_experts=8,
        num_shared_experts=0,
        top_k=2,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
    ),
)

for name, experts, top_k in (("six_experts", 6, 2), ("two_experts", 2, 1)):
    base = qwen3.qwen3_args["tiny"]
    moe_args = dataclasses.replace(base.moe_args, num_experts=experts, top_k=top_k)
    qwen3.qwen3_args[name] = dataclasses.replace(base, moe_args=moe_args)


class Runner:
    """Builds trainers from command-line arguments, all from the same full weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def weights(self, flavor: str) -> Path:
        path = self.folder / f"weights-{flavor}-{dist.get_world_size()}"
        return made_once(path, lambda: qwen3.Qwen3Model(qwen3.qwen3_args[flavor]))

    def trainer(self, *arguments: str, **options: Any) -> titan_train.Trainer:
        """Arguments are TorchTitan's; options: backend (None = stock), ep, ac, steps."""
        return _trainer(self._arguments(arguments, **options))

    def train(self, *arguments: str, **options: Any) -> dict[str, Any]:
        """Train and return what TorchTitan printed, by step, and the trainer."""
        return train(self.trainer(*arguments, **options))

    def _arguments(
        self,
        extra: tuple[str, ...],
        *,
        backend: str | None,
        ep: int,
        ac: str = "none",
        steps: int = STEPS,
        flavor: str = "tiny",
    ) -> list[str]:
        self.count += 1
        arguments = {
            "job.custom_config_module": "titan_megamoe.torchtitan",
            "job.dump_folder": str(self.folder / f"run-{dist.get_world_size()}-{self.count}"),
            "model.name": "qwen3",
            "model.flavor": flavor,
            "model.hf_assets_path": str(self.folder / "assets" / "tokenizer"),
            "training.dataset_path": str(self.folder / "assets" / "data"),
            "training.local_batch_size": "2",
            "training.seq_len": "64",
            "training.steps": str(steps),
            "optimizer.lr": "5e-4",
            "lr_scheduler.warmup_steps": "2",
            "parallelism.expert_parallel_degree": str(ep),
            "activation_checkpoint.mode": ac,
            "metrics.log_freq": "1",
            "debug.seed": "0",
            "comm.trace_buf_size": "0",
            "checkpoint.initial_load_path": str(self.weights(flavor)),
        }
        if backend is not None:
            arguments["model.converters"] = "mega_moe"
            arguments["mega_moe.backend"] = backend
        return options_of(arguments, extra)


def _trainer(arguments: list[str]) -> titan_train.Trainer:
    return titan_train.Trainer(ConfigManager().parse_args(arguments))


def _blocks(trainer: titan_train.Trainer) -> list[MoE]:
    return [m for m in trainer.model_parts[0].modules() if isinstance(m, MoE)]


def _full_gradients(trainer: titan_train.Trainer) -> dict[str, torch.Tensor]:
    return {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad.full_tensor()
        for name, parameter in trainer.model_parts[0].named_parameters()
        if parameter.grad is not None
    }


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def two_ranks(run: Runner) -> dict[str, Any]:
    """EP=2 and EP=1 on two ranks: parity, layout, accumulation, selective and full checkpointing."""
    out: dict[str, Any] = {}
    for name, backend in (("stock", None), ("all_to_all", "all_to_all")):
        result = run.train(backend=backend, ep=2)
        out[name] = result["printed"]
        out[f"{name} layout"] = layout(result["trainer"])
        out[f"{name} blocks"] = [type(b).__name__ for b in _blocks(result["trainer"])]
    for name, backend in (("stock", None), ("reference", "reference")):
        out[f"{name} calm"] = run.train(*CALM, backend=backend, ep=2)["printed"]
        out[f"{name} without ties"] = run.train(*CALM, FORCED, backend=backend, ep=2)["printed"]
    accumulate = ("--training.global_batch_size=16",)
    for name, backend in (("stock", None), ("all_to_all", "all_to_all")):
        out[f"{name} accumulated"] = run.train(*accumulate, backend=backend, ep=2)["printed"]
        out[f"{name} EP=1"] = run.train(backend=backend, ep=1)["printed"]
    ddp = (
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.data_parallel_shard_degree=1",
    )
    for name, backend in (("stock", None), ("all_to_all", "all_to_all")):
        out[f"{name} DDP"] = run.train(*ddp, backend=backend, ep=1)["printed"]
    layers = ("--activation_checkpoint.selective_ac_option=2",)
    out["all_to_all selective layers"] = run.train(*layers, backend="all_to_all", ep=2, ac="selective")[
        "printed"
    ]
    ops = ("--activation_checkpoint.selective_ac_option=op",)
    with count_forwards() as calls:
        out["all_to_all selective op"] = run.train(*ops, backend="all_to_all", ep=2, ac="selective")[
            "printed"
        ]
    out["forwards selective op"] = len(calls)
    with count_forwards() as calls:
        run.train(backend="all_to_all", ep=2, ac="full")
    out["forwards full"], out["dtypes full"] = len(calls), sorted(set(calls))
    compiled = ("--compile.enable", "--compile.components=model", "--compile.backend=aot_eager")
    out["all_to_all compiled"] = run.train(*compiled, backend="all_to_all", ep=2, ac="full")["printed"]
    out["validated"] = _validation(run)
    out |= _direct(run, *accumulate, *compiled)
    return out


def _direct(run: Runner, *accumulated_and_compiled: str) -> dict[str, Any]:
    """Experts taken as FSDP holds them: as they are, and with all that surrounds them."""
    with count_forwards() as dtypes:
        result = run.train(DIRECT, backend="all_to_all", ep=2)
    trainer = result["trainer"]
    return {
        "direct": result["printed"],
        "direct layout": layout(trainer),
        "direct dtypes": sorted(set(dtypes)),
        "direct without sync": _without_sync(trainer),
        "direct accumulated": run.train(
            DIRECT, *accumulated_and_compiled, backend="all_to_all", ep=2, ac="full"
        )["printed"],
    }


def _without_sync(trainer: titan_train.Trainer) -> list[float]:
    """Norms of the experts' gradients after one and after two backwards that FSDP does not reduce."""
    model = trainer.model_parts[0]
    model.set_requires_gradient_sync(False)
    tokens = torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(dist.get_rank()))
    trainer.optimizers.zero_grad()
    norms = []
    for _ in range(2):
        model(tokens).float().logsumexp(-1).sum().backward()
        norms.append(float(_blocks(trainer)[0].experts.w1.grad.to_local().norm()))
    return norms


def _validation(run: Runner) -> list[tuple[str, str]]:
    arguments = (
        "--validation.enable",
        "--validation.dataset=c4_test",
        f"--validation.dataset_path={run.folder / 'assets' / 'data'}",
        "--validation.local_batch_size=3",
        "--validation.seq_len=64",
        "--validation.steps=2",
        "--validation.freq=4",
    )
    return run.train(*arguments, backend="all_to_all", ep=2)["printed"]


def checkpoints(run: Runner) -> dict[str, Any]:
    """A run of eight steps against four steps, a checkpoint, and four more in another job."""
    out: dict[str, Any] = {}
    half = STEPS // 2
    for name, first, second in (
        ("stock to stock", None, None),
        ("stock to mega_moe", None, "all_to_all"),
        ("mega_moe to stock", "all_to_all", None),
        ("direct to direct", "all_to_all", "all_to_all"),
    ):
        folder = run.folder / f"checkpoint {name}"
        save = ("--checkpoint.interval=100", f"--checkpoint.folder={folder}")
        schedule = f"--lr_scheduler.total_steps={STEPS}"
        more = ("--checkpoint.no_last_save_model_only", *((DIRECT,) if "direct" in name else ()))
        before = run.train(*save, *more, schedule, backend=first, ep=2, steps=half)
        after = run.train(*save, *more, schedule, backend=second, ep=2, steps=STEPS)
        out[name] = before["printed"] + after["printed"]
    return out


def load_balancing(run: Runner) -> dict[str, Any]:
    """expert_bias after training: TorchTitan's balancing optimizers against our hook."""
    out: dict[str, Any] = {}
    counted: list[float] = []
    balance = ("--mega_moe.load_balancing", "--training.global_batch_size=8")
    for ac in ("none", "full"):
        _watch_counts(counted := [])
        result = run.train(*balance, backend="all_to_all", ep=2, ac=ac)
        out[f"mega_moe {ac}"] = [b.expert_bias.tolist() for b in _blocks(result["trainer"])]
        out[f"mega_moe {ac} printed"] = result["printed"]
        out[f"mega_moe {ac} counted"] = sorted(set(counted))
    _watch_counts(None)
    # TorchTitan's own balancing, for stock and for a job that keeps its own balancing train spec.
    spec = qwen3.get_train_spec()
    spec.build_optimizers_fn = build_optimizers_with_moe_load_balancing
    train_spec.register_train_spec("qwen3", spec)
    accumulate = ("--training.global_batch_size=8",)
    for ac in ("none", "full"):
        for name, backend in (("stock", None), ("stock's hook", "all_to_all")):
            result = run.train(*accumulate, backend=backend, ep=2, ac=ac)
            out[f"{name} {ac}"] = [b.expert_bias.tolist() for b in _blocks(result["trainer"])]
            out[f"{name} {ac} printed"] = result["printed"]
    return out


def _watch_counts(counted: list[float] | None) -> None:
    """Record what each balancing update sees in each block, summed over experts and ranks."""
    from titan_megamoe.torchtitan import converter, load_balancing

    if counted is None:
        converter.update_expert_bias = load_balancing.update_expert_bias
        return

    def watched(blocks: list[MegaMoE], dims: Any) -> None:
        totals = torch.stack([b.tokens_per_expert.sum() for b in blocks])
        dist.all_reduce(totals)
        counted.extend(totals.tolist())
        load_balancing.update_expert_bias(blocks, dims)

    converter.update_expert_bias = watched


def router_gradient(_: Runner) -> dict[str, Any]:
    """One block on EP=2, half of the tokens each, against TorchTitan's block on all tokens."""
    args = qwen3.qwen3_args["tiny"]
    generator = torch.Generator().manual_seed(3)
    stock = MoE(args.moe_args, dim=args.dim, hidden_dim=args.moe_inter_dim)
    for parameter in stock.parameters():
        parameter.data = (0.2 * torch.randn(parameter.shape, generator=generator)).bfloat16()
    x = torch.randn(2, 48, args.dim, generator=generator).bfloat16()
    target = torch.randn(x.shape, generator=generator)
    stock(x).float().mul(target).sum().backward()

    from titan_megamoe import MegaMoEConfig

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    rank = mesh.get_local_rank()
    full = MoE(args.moe_args, dim=args.dim, hidden_dim=args.moe_inter_dim)
    full.load_state_dict(stock.state_dict())
    block = MegaMoE(full.bfloat16(), MegaMoEConfig(backend="reference"), mesh)
    half = args.moe_args.num_experts // 2
    for name, weight in list(block.experts.named_parameters(recurse=False)):
        shard = torch.nn.Parameter(weight.data[rank * half : (rank + 1) * half].clone())
        block.experts.register_parameter(name, shard)
    optimizer = torch.optim.SGD([block.router.gate.weight], lr=1e-2)
    ratios, replicas = [], []
    for step in range(3):
        optimizer.zero_grad()
        mine = slice(rank, rank + 1)
        block(x[mine]).float().mul(target[mine]).sum().backward()
        gradient = block.router.gate.weight.grad
        dist.all_reduce(gradient)
        if step == 0:
            expected = stock.router.gate.weight.grad
            ratios = [
                float(gradient.float().norm() / expected.float().norm()),
                _relative(gradient.float(), expected.float()),
            ]
        optimizer.step()
        both = [torch.empty_like(block.router.gate.weight.data) for _ in range(2)]
        dist.all_gather(both, block.router.gate.weight.data)
        replicas.append(torch.equal(*both))
    return {"ratio": ratios[0], "relative": ratios[1], "replicas equal": replicas}


def four_ranks(run: Runner) -> dict[str, Any]:
    """EP=2 x FSDP=2 with full checkpointing, and HSDP 2 x 2."""
    out: dict[str, Any] = {}
    hsdp = (
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.data_parallel_shard_degree=2",
    )
    for name, backend in (("stock", None), ("all_to_all", "all_to_all")):
        result = run.train(backend=backend, ep=2, ac="full")
        out[f"{name} EPxFSDP"] = result["printed"]
        out[f"{name} EPxFSDP layout"] = layout(result["trainer"])
        result = run.train(*hsdp, backend=backend, ep=2)
        out[f"{name} HSDP"] = result["printed"]
        out[f"{name} HSDP layout"] = layout(result["trainer"])
    for name, backend in (("stock", None), ("reference", "reference")):
        out[f"{name} EPxFSDP calm"] = run.train(*CALM, backend=backend, ep=2, ac="full")["printed"]
        out[f"{name} HSDP calm"] = run.train(*CALM, *hsdp, backend=backend, ep=2)["printed"]
    gates = [b.router.gate.weight.to_local() for b in _blocks(result["trainer"])]
    out["HSDP gates equal"] = []
    replicas = result["trainer"].parallel_dims.get_mesh("dp_replicate").get_group()
    for gate in gates:
        both = [torch.empty_like(gate) for _ in range(2)]
        dist.all_gather(both, gate.detach(), group=replicas)
        out["HSDP gates equal"].append(torch.equal(*both))
    return out


def expert_degrees(run: Runner) -> dict[str, Any]:
    """The same global batch with EP = 1, 2, 4 on four ranks: full gradients and clip norm."""
    out: dict[str, Any] = {}
    unclipped = ("--training.max_norm=1e9",)
    expected = None
    for ep in (1, 2, 4):
        result = run.train(*unclipped, backend="all_to_all", ep=ep, steps=1)
        gradients = _full_gradients(result["trainer"])
        expected = expected or gradients
        out[f"EP={ep}"] = {
            "printed": result["printed"],
            "gradients": {k: _relative(g, expected[k]) for k, g in gradients.items()},
            "missing": sorted(set(expected) - set(gradients)),
        }
    return out


def uneven_shards(run: Runner) -> dict[str, Any]:
    """Experts that FSDP cannot share out evenly: 3 of an EP rank on 2 shards, 6 on 4, and 1 on 2."""
    out: dict[str, Any] = {}
    for flavor, ep in (("six_experts", 2), ("six_experts", 1), ("two_experts", 2)):
        for name, backend in (("stock", None), ("all_to_all", "all_to_all")):
            result = run.train(backend=backend, ep=ep, steps=3, flavor=flavor)
            out[f"{name} {flavor} EP={ep}"] = result["printed"]
            out[f"{name} {flavor} EP={ep} layout"] = layout(result["trainer"])
    return out


SUITES: dict[str, tuple[Any, ...]] = {
    "two_ranks": (two_ranks,),
    "restarts": (checkpoints, router_gradient),
    "load_balancing": (load_balancing,),
    "four_ranks": (four_ranks,),
    "expert_layouts": (expert_degrees, uneven_shards),
}


if __name__ == "__main__":
    main(Runner, SUITES)
