"""What a layer measurement compares: ours, TorchTitan's own blocks, and deep_gemm's mega MoE.

An implementation is a function of one rank's inputs that gives y. Names are those of the result records;
`+compile` compiles TorchTitan's experts as its trainer does with compile on, `:N` sets DeepEP's SMs.
The router stays outside of all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module

from ..config import MegaMoEConfig
from ..errors import ConfigError, UnsupportedError
from ..op import mega_moe
from ..workspace import workspace_bytes
from .inputs import LayerInputs, LayerWeights
from .shapes import LayerShape


@dataclass(frozen=True)
class Setting:
    """What an implementation is built for."""

    shape: LayerShape
    tokens: int
    weights: LayerWeights
    group: dist.ProcessGroup | None
    mesh: DeviceMesh | None
    config: MegaMoEConfig

    @property
    def device(self) -> torch.device:
        return self.weights.w1.device


@dataclass(frozen=True)
class Implementation:
    """`label` as asked for; `impl`, `precision`, `wgrad_precision`, `num_sms`, `compile` as in a record.

    forget: drop what calls keep between them, quantized weights, so that each run's memory counts its own.
    quantize: what an optimizer step costs beside forward and backward, since quantized weights are kept until
    the next one; None where nothing is kept. workspace_bytes: symmetric memory of a rank, which PyTorch's
    allocator does not count. trial: attributes of the fused backend while it is measured.
    """

    label: str
    impl: str
    precision: str
    forward: Callable[[LayerInputs], Tensor]
    differentiable: bool = True
    num_sms: int = 0
    compile: bool = False
    quantize: Callable[[], object] | None = None
    forget: Callable[[], None] = lambda: None
    workspace_bytes: int = 0
    wgrad_precision: str = "bf16"
    trial: dict[str, object] = field(default_factory=dict)

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Forwards and backwards inside are those of the trial."""
        from ..backends.hopper.backend import FusedBackend

        before = {name: getattr(FusedBackend, name) for name in self.trial}
        try:
            for name, value in self.trial.items():
                setattr(FusedBackend, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(FusedBackend, name, value)


def build(label: str, setting: Setting) -> Implementation:
    """The implementation of that name.

    mega_moe, mega_moe@fp8: the fused backend; mega_moe@fp8/bf16: with bf16 weight gradients;
    mega_moe+expand@fp8: with one of TRIALS, which the record's `impl` names too. all_to_all:
    ours, unfused. torchtitan, torchtitan+compile: stock all-to-all. deepep:24, deepep+compile:24:
    TorchTitan's DeepEP block. deep_gemm: fp8, forward only.
    Raises ConfigError for another name and UnsupportedError for what cannot run here.
    """
    name, _, sms = label.partition(":")
    name, _, precision = name.partition("@")
    precision, _, wgrad = precision.partition("/")
    name, _, compiled = name.partition("+")
    num_sms = int(sms or 0)
    trials = compiled.split("+") if name == "mega_moe" and compiled else []
    if not set(trials) <= set(TRIALS) or (not trials and compiled not in ("", "compile")):
        raise ConfigError(f"implementation {label!r}: '+{compiled}' is unknown, only '+compile' is.")
    match name:
        case "mega_moe" | "all_to_all" | "reference":
            backend = "fused" if name == "mega_moe" else name
            config = replace(
                setting.config,
                backend=backend,
                precision=precision or "bf16",
                wgrad_precision=wgrad or "auto",
            )
            forward = _ours(setting, config)
            made = Implementation(
                label, name, config.precision, forward, wgrad_precision=config.wgrad_precision
            )
            for trial in trials:
                made = replace(made, impl=f"{made.impl}+{trial}", trial=made.trial | TRIALS[trial])
            return _with_costs(made, setting) if name == "mega_moe" else made
        case "torchtitan":
            forward = _stock(setting, deepep=False, compiled=bool(compiled))
            return Implementation(label, name, "bf16", forward, compile=bool(compiled))
        case "deepep":
            if setting.group is None:
                raise UnsupportedError("DeepEP needs an expert-parallel group of at least 2 ranks.")
            forward = _stock(setting, deepep=True, compiled=bool(compiled), num_sms=num_sms or 24)
            return Implementation(label, name, "bf16", forward, num_sms=num_sms or 24, compile=bool(compiled))
        case "deep_gemm":
            from .deep_gemm_moe import build_deep_gemm

            return Implementation(label, name, "fp8", build_deep_gemm(setting), differentiable=False)
    raise ConfigError(
        f"implementation {label!r} is unknown; there are mega_moe, all_to_all, reference, torchtitan, deepep "
        f"and deep_gemm."
    )


TRIALS: dict[str, dict[str, object]] = {
    "expand": {"first_half": "expanded"},
    "copied": {"first_half": "copied"},
    "inside": {"first_half": "gathered"},
    "combine_triton": {"combine_in": "triton"},
}
"""Attributes of the fused backend that are another way to do the same, and what they are in a trial."""


def _with_costs(made: Implementation, setting: Setting) -> Implementation:
    """The fused backend's own costs beside its time."""
    world = 1 if setting.group is None else setting.group.size()
    size = workspace_bytes(
        world=world, max_tokens_per_rank=setting.tokens, top_k=setting.shape.top_k,
        hidden=setting.shape.hidden, precision=made.precision,
    )  # fmt: skip
    if made.precision == "bf16":
        return replace(made, workspace_bytes=size)

    def quantize() -> object:
        from ..backends.hopper.fp8_quantize import quantize_weights

        w1, w3, w2 = (w.detach() for w in setting.weights.all())
        return quantize_weights([w1, w3]), quantize_weights([w2])

    def forget() -> None:
        from ..backends import get_backend
        from ..backends.hopper import Fp8FusedBackend

        fused = get_backend("fused")
        assert isinstance(fused, Fp8FusedBackend)
        fused.weights.clear()

    return replace(made, workspace_bytes=size, quantize=quantize, forget=forget)


def _ours(setting: Setting, config: MegaMoEConfig) -> Callable[[LayerInputs], Tensor]:
    def forward(inputs: LayerInputs) -> Tensor:
        w1, w3, w2 = setting.weights.all()
        return mega_moe(inputs.x, inputs.ids, inputs.weights, w1, w3, w2, group=setting.group, config=config)

    return forward


class _GivenRouting(nn.Module):
    """Stands where TorchTitan's router is and returns the routing of the current inputs."""

    def __init__(self, top_k: int, experts: int) -> None:
        super().__init__()
        self.top_k, self.experts = top_k, experts
        self.inputs: LayerInputs | None = None

    def forward(self, _x: Tensor, _bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        assert self.inputs is not None
        counts = torch.histc(self.inputs.ids.view(-1), bins=self.experts, min=0, max=self.experts)
        return self.inputs.weights, self.inputs.ids, counts


def _stock(
    setting: Setting, *, deepep: bool, compiled: bool, num_sms: int = 0
) -> Callable[[LayerInputs], Tensor]:
    """TorchTitan 0.2's own block, with its own expert-parallel hooks, around given routing."""
    from torchtitan.distributed.expert_parallel import DeepEPExpertParallel, ExpertParallel
    from torchtitan.models.moe import moe as titan_moe
    from torchtitan.models.moe.moe import MoE, MoEArgs

    shape = setting.shape
    block_class: type[MoE] = MoE
    if deepep:
        import deep_ep
        from torchtitan.models.moe.moe_deepep import DeepEPMoE

        deep_ep.Buffer.set_num_sms(num_sms)
        block_class = DeepEPMoE
    arguments = MoEArgs(
        num_experts=shape.experts,
        num_shared_experts=0,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
        top_k=shape.top_k,
        load_balance_coeff=None,
    )
    with torch.device("meta"):
        block = block_class(arguments, dim=shape.hidden, hidden_dim=shape.intermediate)
    routing = _GivenRouting(shape.top_k, shape.experts)
    block.router = routing
    block.tokens_per_expert = torch.zeros(shape.experts, device=setting.device)
    for name in ("w1", "w3", "w2"):
        local = getattr(setting.weights, name)
        if setting.mesh is not None:
            local = DTensor.from_local(local, setting.mesh, [Shard(0)], run_check=False)
        # A plain attribute: gradients are taken with respect to the setting's own leaves.
        del block.experts._parameters[name]
        setattr(block.experts, name, local)
    if setting.mesh is not None:
        style = DeepEPExpertParallel(score_before_experts=False) if deepep else ExpertParallel()
        distribute_module(
            block.experts, setting.mesh, input_fn=style._token_dispatch, output_fn=style._token_combine
        )
    experts = _compiled_experts() if compiled else _eager_experts()

    def forward(inputs: LayerInputs) -> Tensor:
        titan_moe._run_experts_grouped_mm = experts  # what TorchTitan's apply_compile replaces
        routing.inputs = inputs
        return block(inputs.x.unsqueeze(0)).squeeze(0)

    return forward


_eager: list[Callable[..., Tensor]] = []


def _eager_experts() -> Callable[..., Tensor]:
    """TorchTitan's expert function as it was before anything here replaced it."""
    from torchtitan.models.moe import moe as titan_moe

    if not _eager:
        _eager.append(titan_moe._run_experts_grouped_mm)
    return _eager[0]


def _compiled_experts() -> Callable[..., Tensor]:
    """TorchTitan's experts, compiled with a dynamic number of rows as its trainer compiles them."""
    compiled = torch.compile(_eager_experts(), fullgraph=True)

    def run(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, counts: Tensor) -> Tensor:
        torch._dynamo.mark_dynamic(x, 0)
        return compiled(w1, w2, w3, x, counts)

    return run
