"""A TorchTitan 0.2 job file as a configuration of TorchTitan 0.3.

What was renamed is mapped, what is lacking is refused.

    [section] option ─ same name in 0.3 ─────────── set
                     ─ MOVED ────────────────────── set where 0.3 has it
                     ─ GONE, at 0.2's default ───── nothing to do
                     ─ built by hand below ──────── model, optimizer, checkpointing, quantization
                     ─ anything else ────────────── ConfigError

The defaults of the options that both lines have are the same, so a job file means the same job on both. Where
0.3 has no equal, it is said here: attention inside documents only (0.2: the whole sequence), and the expert
bias, which 0.3 updates for Qwen3 unless [mega_moe] load_balancing = false.
"""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from pathlib import Path
from typing import Any

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models import qwen3
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.common.moe import MoE
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from ...errors import ConfigError, UnsupportedError
from . import flavors
from .checks import refuse_job
from .converter import MegaMoEConverter

Place = tuple[str, str]
"""(section, option); nested sections are dotted."""

MOVED: dict[Place, str] = {
    ("job", "dump_folder"): "dump_folder",
    ("job", "print_config"): "debug.print_config",
    ("job", "save_config_file"): "debug.save_config_file",
    ("model", "hf_assets_path"): "hf_assets_path",
    ("training", "dataset"): "dataloader.dataset",
    ("training", "dataset_path"): "dataloader.dataset_path",
    ("parallelism", "enable_async_tensor_parallel"): "compile.enable_async_tensor_parallel",
    ("validation", "dataset"): "validator.dataloader.dataset",
    ("validation", "dataset_path"): "validator.dataloader.dataset_path",
}
MOVED_SECTIONS = {
    "profiling": "profiler",
    "training.dataloader": "dataloader",
    "validation": "validator",
    "validation.dataloader": "validator.dataloader",
}
SAME_SECTIONS = (
    "metrics", "lr_scheduler", "training", "parallelism", "checkpoint", "comm", "compile", "debug",
)  # fmt: skip
GONE: dict[Place, Any] = {
    ("job", "config_file"): None,
    ("model", "tokenizer_path"): None,
    ("model", "print_after_conversion"): False,
    ("optimizer", "early_step_in_backward"): False,
    ("parallelism", "disable_loss_parallel"): False,
    ("parallelism", "expert_tensor_parallel_degree"): 1,
    ("parallelism", "pipeline_parallel_expert_parallel_overlap"): True,
    ("parallelism", "context_parallel_rotate_method"): "allgather",
    ("checkpoint", "enable_ft_dataloader_checkpoints"): True,
    ("activation_checkpoint", "early_stop"): False,
    ("memory_estimation", "enable"): False,
    ("memory_estimation", "disable_fake_mode"): False,
    ("fault_tolerance", "enable"): False,
    ("experimental", "custom_import"): "",
    ("experimental", "custom_args_module"): "",
    ("quantize.linear.float8", "enable_fsdp_float8_all_gather"): False,
    ("quantize.linear.float8", "precompute_float8_dynamic_scale_for_fsdp"): False,
}
"""Options that only 0.2 has, with the one value at which 0.3 does the same."""


def read_job(path: Path | str, options: list[str]) -> Trainer.Config:
    """The job of a 0.2 file, with 0.2's command-line options over it.

    Raises:
        ConfigError, UnsupportedError: one sentence on what was found, what is needed and the fix.
        FileNotFoundError: there is no such file.
    """
    given = _read(Path(path), options)
    for place in (("job", "description"), *GONE):
        _drop(given, place)
    training = {key: given.get(("training", key)) for key in ("local_batch_size", "seq_len")}
    validated = bool(given.get(("validation", "enable")))
    _same_batch_in_validation(given, training, validated)
    spec = _model(given)
    config = Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
        ),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test"),
        optimizer=_optimizer(given),
        activation_checkpoint=_activation_checkpoint(given),
    )
    # 0.2 has no CUDA graphs, and DTensors on model-parallel axes only.
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    for place, value in given.items():
        _set(config, place, value)
    config = dataclasses.replace(
        config,
        **{  # runs their __post_init__ on the values that were set
            f.name: dataclasses.replace(getattr(config, f.name))
            for f in dataclasses.fields(config)
            if f.name in ("parallelism", "checkpoint", "validator", "compile")
        },
    )
    refuse_job(config)
    return config


def _read(path: Path, options: list[str]) -> dict[Place, Any]:
    """Options of the file and of the command line by place, the latter over the former."""
    given = dict(_flatten(tomllib.loads(path.read_text(encoding="utf-8"))))
    rest = list(options)
    while rest:
        word = rest.pop(0)
        name, has_value, text = word.removeprefix("--").partition("=")
        section, _, key = name.replace("-", "_").rpartition(".")
        if not word.startswith("--") or not section:
            raise ConfigError(f"{word!r} is not an option; write --section.option=value.")
        if not has_value and rest and not rest[0].startswith("--"):
            has_value, text = "=", rest.pop(0)
        if has_value:
            given[section, key] = _value(text)
        else:
            given[section, key.removeprefix("no_")] = not key.startswith("no_")
    return given


def _flatten(table: dict[str, Any], section: str = "") -> typing.Iterator[tuple[Place, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{section}.{key}" if section else key)
        else:
            yield (section, key), value


def _value(text: str) -> Any:
    """A command-line value: TOML where it is, Python's True, False and None, else the text itself."""
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _drop(given: dict[Place, Any], place: Place) -> None:
    """Take out an option that 0.3 lacks, if it is at the value where that makes no difference."""
    value = given.pop(place, GONE.get(place))
    if place in GONE and value != GONE[place]:
        raise UnsupportedError(
            f"[{place[0]}] {place[1]} is {value!r}, which TorchTitan 0.3 does not have: take it out or run "
            "this job on TorchTitan 0.2.2."
        )


def _set(config: Trainer.Config, place: Place, value: Any) -> None:
    section, key = place
    if place in MOVED:
        path = MOVED[place]
    elif section in MOVED_SECTIONS:
        path = f"{MOVED_SECTIONS[section]}.{key}"
    elif section in SAME_SECTIONS:
        path = f"{section}.{key}"
    else:
        path = ""
    *owners, name = path.split(".")
    owner: Any = config
    for part in owners:
        owner = getattr(owner, part)
    if name not in {f.name for f in dataclasses.fields(owner)}:
        raise ConfigError(
            f"[{section}] {key} is {value!r}, but TorchTitan 0.3 has no such option: take it out or "
            "correct it."
        )
    setattr(owner, name, _fit(place, value, owner, name))


def _fit(place: Place, value: Any, owner: Any, name: str) -> Any:
    """`value` in the type of the option, which the command line does not tell."""
    hint = typing.get_type_hints(type(owner))[name]
    choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    if choices and value not in choices:
        raise ConfigError(
            f"[{place[0]}] {place[1]} is {value!r}; it must be one of {', '.join(map(str, choices))}."
        )
    default = getattr(owner, name)
    if isinstance(default, list) and isinstance(value, str):
        return value.split(",")
    if isinstance(default, str) and not isinstance(value, str):
        return str(value)
    if isinstance(default, int | float) and (
        not isinstance(value, int | float) or isinstance(default, bool) != isinstance(value, bool)
    ):
        raise ConfigError(
            f"[{place[0]}] {place[1]} is {value!r}; it must be of type {type(default).__name__}."
        )
    return value


def _section(given: dict[Place, Any], section: str) -> dict[str, Any]:
    """Take a whole section out of `given`."""
    return {key: given.pop((s, key)) for s, key in list(given) if s == section}


def _refuse_rest(section: str, rest: dict[str, Any]) -> None:
    for key, value in rest.items():
        raise ConfigError(f"[{section}] {key} is {value!r}, but there is no such option: correct it.")


def _model(given: dict[Place, Any]) -> ModelSpec:
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
    options = _section(given, "mega_moe")
    balancing = options.pop("load_balancing", None)
    compiled = bool(given.get(("compile", "enable"))) and "model" in given.get(
        ("compile", "components"), ["model"]
    )
    quantize = {s: _section(given, s) for s in {s for s, _ in given if s.startswith("quantize.")}}
    converters = [_converter(n, names, options, quantize, compiled) for n in names]
    kwargs = {} if comm == "standard" else {"moe_comm_backend": comm}
    spec = qwen3.model_registry(flavor, converters=converters, **kwargs)
    if "mega_moe" in names and balancing is not None:
        _balance(spec, balancing)
    return spec


def _converter(
    name: str, names: list[str], options: dict[str, Any], quantize: dict[str, dict[str, Any]], compiled: bool
) -> Any:
    from torchtitan.components.quantization import Float8GroupedExpertsConverter, Float8LinearConverter

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


def _optimizer(given: dict[Place, Any]) -> OptimizersContainer.Config:
    section = _section(given, "optimizer")
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


def _activation_checkpoint(given: dict[Place, Any]) -> Any:
    section = _section(given, "activation_checkpoint")
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


def _same_batch_in_validation(given: dict[Place, Any], training: dict[str, Any], validated: bool) -> None:
    """0.3 validates with training's batch."""
    for key, default in (("local_batch_size", 8), ("seq_len", 2048)):
        wanted, has = given.pop(("validation", key), default), training[key] or default
        if validated and wanted != has:
            raise UnsupportedError(
                f"[validation] {key} is {wanted}, but TorchTitan 0.3 validates with [training] {key} = "
                f"{has}: make them equal."
            )
