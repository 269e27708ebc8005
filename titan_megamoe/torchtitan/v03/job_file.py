"""A TorchTitan 0.2 job file as a configuration of TorchTitan 0.3.

What was renamed is mapped, what is lacking is refused.

    [section] option ─ same name in 0.3 ─────────── set
                     ─ MOVED ────────────────────── set where 0.3 has it
                     ─ GONE, at 0.2's default ───── nothing to do
                     ─ built in job_parts.py ──────── model, optimizer, checkpointing, quantization
                     ─ anything else ────────────── ConfigError

The defaults of the options that both lines have are the same, so a job file means the same job on both. Where
0.3 has no equal, it is said here: attention inside documents only (0.2: the whole sequence), and the expert
bias, which 0.3 updates for Qwen3 unless [mega_moe] load_balancing = false.
"""

from __future__ import annotations

import dataclasses
import logging
import tomllib
import typing
from pathlib import Path
from typing import Any

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer

from ...errors import ConfigError, UnsupportedError
from .checks import refuse_job
from .job_parts import Given, Place, checkpointing_of, model_of, optimizer_of

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

EARLY_STOP = ("activation_checkpoint", "early_stop")
"""The one of them that changes time only: said and dropped, whatever its value."""

logger = logging.getLogger("titan_megamoe")


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
    spec = model_of(given)
    config = Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
        ),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test"),
        optimizer=optimizer_of(given),
        activation_checkpoint=checkpointing_of(given),
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


def _read(path: Path, options: list[str]) -> Given:
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


def _drop(given: Given, place: Place) -> None:
    """Take out an option that 0.3 lacks, if it is at the value where that makes no difference."""
    value = given.pop(place, GONE.get(place))
    if place == EARLY_STOP and value:
        logger.warning("TorchTitan 0.3 has no early_stop: blocks are recomputed to their end")
    elif place in GONE and value != GONE[place]:
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


def _same_batch_in_validation(given: Given, training: dict[str, Any], validated: bool) -> None:
    """0.3 validates with training's batch."""
    for key, default in (("local_batch_size", 8), ("seq_len", 2048)):
        wanted, has = given.pop(("validation", key), default), training[key] or default
        if validated and wanted != has:
            raise UnsupportedError(
                f"[validation] {key} is {wanted}, but TorchTitan 0.3 validates with [training] {key} = "
                f"{has}: make them equal."
            )
