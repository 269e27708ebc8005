"""The section ``[mega_moe]`` of a TorchTitan job.

No ``from __future__ import annotations`` here: TorchTitan reads the field types at run time.
"""

from dataclasses import dataclass, field, make_dataclass
from typing import Any

from ..config import MegaMoEConfig


@dataclass
class MegaMoE:
    """How the MoE blocks run once ``mega_moe`` is among ``[model] converters``."""

    backend: str = "auto"
    """auto (the best that can run, logged), reference, all_to_all, deepep or fused."""

    precision: str = "bf16"
    """bf16, fp8, fp8_bwd (bf16 forward, fp8 backward) or mxfp8."""

    wgrad_precision: str = "auto"
    """Operands of the weight-gradient GEMMs: bf16, fp8 (when the backward is fp8), or auto: fp8 with
    precision fp8, else bf16."""

    max_tokens_per_rank: int = 0
    """Bound on a rank's tokens. 0: the job's local_batch_size * seq_len / cp degree."""

    max_routed_rows: int = 0
    """Bound on the rows a rank's experts compute. 0: a multiple of the balanced load."""

    comm_sms: int = 0
    """SMs that carry communication. 0: the backend's default."""

    reserved_sms: int = 0
    """SMs that the fused kernels leave to FSDP and NCCL."""

    timeout_s: float = 300.0
    """Seconds a rank waits for a peer before it gives up with an error."""

    debug: bool = False
    """Check expert ids on the host and synchronise after every call. Slow."""

    load_balancing: bool = False
    """Update expert_bias after every step (auxiliary-loss-free balancing), which Qwen3 in
    TorchTitan 0.2 never does. Needs load_balance_coeff in the model's MoEArgs, which is its
    default.
    """

    direct_experts: bool = False
    """Take the expert weights as FSDP holds them, in fp32, without its casts and copies. Needs expert
    parallelism over all data-parallel ranks, so that FSDP's group for them has one, and another backend
    than deepep. The weights' gradients are not rounded to bf16 on their way, so losses differ in their last
    digits. What is set on FSDP for the experts after the model was built (hooks, a divisor) has no effect.
    Not timed on a GPU yet. TorchTitan 0.2 only.
    """

    def to_op_config(self, max_tokens_per_rank: int) -> MegaMoEConfig:
        """The op's configuration; `max_tokens_per_rank` is taken where the job sets none.

        Raises ConfigError on a value that the op does not know.
        """
        return MegaMoEConfig(
            backend=self.backend,
            precision=self.precision,
            wgrad_precision=self.wgrad_precision,
            max_tokens_per_rank=self.max_tokens_per_rank or max_tokens_per_rank,
            max_routed_rows=self.max_routed_rows,
            comm_sms=self.comm_sms,
            reserved_sms=self.reserved_sms,
            timeout_s=self.timeout_s,
            debug=self.debug,
        )


@dataclass
class JobConfig:
    """What TorchTitan merges into its own JobConfig."""

    mega_moe: MegaMoE = field(default_factory=MegaMoE)


def with_mega_moe(job_config: type) -> type:
    """`job_config`, the JobConfig of another custom_config_module, plus [mega_moe].

    Raises:
        TypeError: `job_config` is not a dataclass, or has a field mega_moe of its own.
    """
    fields: dict[str, Any] | None = getattr(job_config, "__dataclass_fields__", None)
    if fields is None:
        raise TypeError(f"{job_config!r} is not a dataclass; TorchTitan merges dataclasses only.")
    if "mega_moe" in fields:
        raise TypeError(f"{job_config.__name__} already has a section mega_moe; it cannot be added.")
    extra = [("mega_moe", MegaMoE, field(default_factory=MegaMoE))]
    return make_dataclass(job_config.__name__, extra, bases=(job_config,))
