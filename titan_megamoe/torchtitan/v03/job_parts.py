"""The parts of a job file that TorchTitan 0.3 builds from several options: model, optimizer, checkpointing.

Each function takes its options out of what the file gives, and refuses the ones that it does not know.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.quantization import Float8GroupedExpertsConverter, Float8LinearConverter
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.models import qwen3
from torchtitan.models.common.moe import MoE
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import logger

from ...errors import ConfigError, UnsupportedError
from . import flavors
from .checks import without_direct_experts
from .converter import MegaMoEConverter

Place = tuple[str, str]
"""(section, option); nested sections are dotted."""

Given = dict[Place, Any]
"""What the file and the command line say, by place."""


def take_section(given: Given, section: str) -> dict[str, Any]:
    """Take a whole section out of `given`."""
    return {key: given.pop((s, key)) for s, key in list(given) if s == section}


def _refuse_rest(section: str, rest: dict[str, Any]) -> None:
    for key, value in rest.items():
        raise ConfigError(f"[{section}] {key} is {value!r}, but there is no such option: correct it.")


def model_of(given: Given) -> ModelSpec:
    """[model], [mega_moe], [quantize.*] and the dispatcher: the model's specification, converted."""
    module = given.pop(("job", "custom_config_module"), "")
    if module not in ("", "titan_megamoe.torchtitan"):
        raise UnsupportedError(
            f"[job] custom_config_module is {module!r}, which TorchTitan 0.3 does not have: take it out, and "
            "make the job in Python with titan_megamoe.torchtitan.v03.converter.MegaMoEConverter."
        )
    name = given.pop(("model", "name"), "llama3")
    if name != "qwen3":
        raise UnsupportedError(
            f"[model] name is {name!r}, but job files for TorchTitan 0.3 are mapped for 'qwen3' only."
        )
    flavors.add_to_qwen3()
    flavor = given.pop(("model", "flavor"), "debugmodel")
    if flavor not in qwen3.qwen3_configs:
        raise ConfigError(
            f"[model] flavor is {flavor!r}; it must be one of {', '.join(qwen3.qwen3_configs)}."
        )
    names = given.pop(("model", "converters"), [])
    names = [n for n in names.split(",") if n] if isinstance(names, str) else names
    comm = given.pop(("parallelism", "expert_parallel_comm_backend"), "standard")
    if "mega_moe" in names and comm != "standard":
        raise ConfigError(
            f"[parallelism] expert_parallel_comm_backend is {comm!r}, but mega_moe brings its own "
            'communication: set it to "standard" or take mega_moe out of [model] converters.'
        )
    options = without_direct_experts(take_section(given, "mega_moe"))
    balancing = options.pop("load_balancing", None)
    compiled = bool(given.get(("compile", "enable"))) and "model" in given.get(
        ("compile", "components"), ["model"]
    )
    quantize = {s: take_section(given, s) for s in {s for s, _ in given if s.startswith("quantize.")}}
    converters = [_converter(n, names, options, quantize, compiled) for n in names]
    kwargs = {} if comm == "standard" else {"moe_comm_backend": comm}
    spec = qwen3.model_registry(flavor, converters=converters, **kwargs)
    if "mega_moe" in names and balancing is not None:
        _balance(spec, balancing)
    return spec


def _converter(
    name: str, names: list[str], options: dict[str, Any], quantize: dict[str, dict[str, Any]], compiled: bool
) -> Any:
    section = quantize.get(name, {})
    if name == "mega_moe":
        known = {f.name for f in dataclasses.fields(MegaMoEConverter.Config)}
        _refuse_rest("mega_moe", {k: v for k, v in options.items() if k not in known})
        return MegaMoEConverter.Config(**options)
    if name == "quantize.linear.float8":
        # 0.3 renamed the last layer.
        filters = ["lm_head" if fqn == "output" else fqn for fqn in section.pop("filter_fqns", [])]
        recipe, emulate = section.pop("recipe_name", None), section.pop("emulate", False)
        if recipe not in ("rowwise", "rowwise_with_gw_hp"):
            raise UnsupportedError(
                f"[{name}] recipe_name is {recipe!r}, which TorchTitan 0.3 does not have: "
                'set it to "rowwise" or "rowwise_with_gw_hp".'
            )
        _refuse_rest(name, section)
        return Float8LinearConverter.Config(
            recipe_name=recipe, filter_fqns=filters, emulate=emulate, model_compile_enabled=compiled
        )
    if name == "quantize.grouped_mm.float8":
        if "mega_moe" in names:
            raise ConfigError(
                f"[model] converters has both mega_moe and {name!r}, which want the same expert weights: "
                f"take {name!r} out and choose the precision in [mega_moe]."
            )
        if section.pop("fqns", ["experts"]) != ["experts"]:
            raise UnsupportedError(
                f'[{name}] fqns names single blocks, but TorchTitan 0.3 converts all: set it to ["experts"].'
            )
        return Float8GroupedExpertsConverter.Config(model_compile_enabled=compiled)
    raise UnsupportedError(
        f"[model] converters has {name!r}, which is not mapped to TorchTitan 0.3: it must be one of "
        "mega_moe, quantize.linear.float8, quantize.grouped_mm.float8."
    )


def _balance(spec: ModelSpec, balancing: bool) -> None:
    """[mega_moe] load_balancing: whether the expert bias moves. TorchTitan 0.3 moves Qwen3's by default."""
    if not balancing:
        spec.post_optimizer_build_fn = None
        return
    for fqn, moe, _, _ in spec.model.traverse(MoE.Config):
        if moe.load_balance_coeff is None:
            raise ConfigError(
                f"[mega_moe] load_balancing is on, but {fqn} of flavour {spec.flavor!r} has no "
                "load_balance_coeff: set it in its MoE.Config, or turn load_balancing off."
            )


def optimizer_of(given: Given) -> OptimizersContainer.Config:
    """[optimizer]: one group of all parameters."""
    section = take_section(given, "optimizer")
    name = section.pop("name", "AdamW")
    if name not in ("Adam", "AdamW"):
        raise ConfigError(f"[optimizer] name is {name!r}; it must be one of Adam, AdamW.")
    implementation = section.pop("implementation", "fused")
    kwargs = {
        "lr": section.pop("lr", 8e-4),
        "betas": (section.pop("beta1", 0.9), section.pop("beta2", 0.95)),
        "eps": section.pop("eps", 1e-8),
        "weight_decay": section.pop("weight_decay", 0.1),
    }
    _refuse_rest("optimizer", section)
    group = ParamGroupConfig(pattern=r".*", optimizer_name=name, optimizer_kwargs=kwargs)
    return OptimizersContainer.Config(param_groups=[group], implementation=implementation)


def checkpointing_of(given: Given) -> Any:
    """[activation_checkpoint]: a policy, or None."""
    section = take_section(given, "activation_checkpoint")
    mode = section.pop("mode", "selective")
    layers = section.pop("selective_ac_option", None)
    fqns = section.pop("per_op_sac_force_recompute_mm_shapes_by_fqns", ["moe.router.gate"])
    budget = {k: section.pop(k) for k in ("memory_budget", "visualize_memory_budget_pareto") if k in section}
    common = {k: section.pop(k) for k in ("preserve_rng_state", "determinism_check", "debug") if k in section}
    _refuse_rest("activation_checkpoint", section)
    if mode == "none":
        return None
    if mode == "full":
        return FullAC.Config(**common)
    if mode == "memory_budget":
        return MemoryBudgetAC.Config(**common, **budget)
    if mode != "selective":
        raise ConfigError(
            f"[activation_checkpoint] mode is {mode!r}; it must be one of none, full, selective, "
            "memory_budget."
        )
    if layers is None:
        logger.info(
            "[activation_checkpoint] selective checkpointing is per op in TorchTitan 0.3, where 0.2's "
            "default is every second layer"
        )
    elif layers != "op":
        raise UnsupportedError(
            f"[activation_checkpoint] selective_ac_option is {layers!r}, but TorchTitan 0.3 selects by op "
            'only: set it to "op", or mode to "full" or "none".'
        )
    return SelectiveAC.Config(**common, force_recompute_mm_shapes_by_fqns=fqns)
