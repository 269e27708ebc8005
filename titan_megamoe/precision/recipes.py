"""Recipes: a precision's name → the operand formats of every GEMM of the op.

The op has six GEMMs per expert (R its rows, H hidden, I intermediate; h' = w·silu(g)·u):

    GEMM     computes           left operand (R, ·)   right operand            contracts over
    gemm1    g, u = x·W1ᵀ, x·W3ᵀ  x (R, H)            W1, W3 (I, H)            H
    gemm2    o = h'·W2ᵀ           h' (R, I)           W2 (H, I)                I
    dgrad2   dh' = dy·W2          dy (R, H)           W2 (H, I)                H
    dgrad1   dx = dg·W1 + du·W3   dg, du (R, I)       W1, W3 (I, H)            I
    wgrad2   dW2 = dyᵀ·h'         dy (R, H)           h' (R, I)                R
    wgrad1   dW1, dW3 = dgᵀ·x, duᵀ·x  dg, du (R, I)   x (R, H)                 R

Every format is described on the tensor as stored above, never on a transpose, and its scales never
cross the contraction: 1×128 blocks run along a row's last dimension, 128×1 blocks along the rows of
an expert in the order (source rank, token, slot), its last block as short as its rows.

Accumulation is fp32 everywhere and g, u are kept for the backward in bf16. A format is applied to
the value as it leaves the fp32 epilogue (h', dg, du): an fp8 operand is not rounded to bf16 first. The
exception is 128×1: a block takes rows of many tiles, so its operands pass through memory in bf16, as
they do in torchao's autograd function, whose dg, du and h' are bf16 tensors.

Source of the block shapes: DeepSeek-V3 (arXiv 2412.19437, section 3.3) and
`torchao.prototype.blockwise_fp8_training`; the enum → dataclass manner is torchao's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from ..errors import ConfigError, UnsupportedError


class Format(StrEnum):
    """How one GEMM operand is represented. All fp8 is e4m3 (fn) with fp32 scales per block."""

    BF16 = "bf16"
    ACT_1X128 = "e4m3 1x128"
    WEIGHT_128X128 = "e4m3 128x128"
    TOKENS_128X1 = "e4m3 128x1"


@dataclass(frozen=True)
class GemmFormats:
    """Formats of the two operands of one GEMM, left and right as in the module's table."""

    lhs: Format
    rhs: Format

    @property
    def is_fp8(self) -> bool:
        return self.lhs is not Format.BF16


BF16_GEMM = GemmFormats(Format.BF16, Format.BF16)
FP8_GEMM = GemmFormats(Format.ACT_1X128, Format.WEIGHT_128X128)
FP8_WGRAD = GemmFormats(Format.TOKENS_128X1, Format.TOKENS_128X1)


class RecipeName(StrEnum):
    """Every precision there is a seat for."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP8_BWD = "fp8_bwd"
    MXFP8 = "mxfp8"


@dataclass(frozen=True)
class Recipe:
    """Operand formats of the six GEMMs (see the module's table); built by `Recipe.from_name`."""

    name: RecipeName
    gemm1: GemmFormats
    gemm2: GemmFormats
    dgrad2: GemmFormats
    dgrad1: GemmFormats
    wgrad2: GemmFormats
    wgrad1: GemmFormats

    @property
    def fp8_forward(self) -> bool:
        return self.gemm1.is_fp8

    @property
    def fp8_backward(self) -> bool:
        return self.dgrad1.is_fp8

    @property
    def fp8_wgrad(self) -> bool:
        return self.wgrad1.is_fp8

    @classmethod
    def from_name(cls, name: RecipeName | str, wgrad_precision: str = "bf16") -> Recipe:
        """The recipe of a precision.

        Args:
            name: `bf16`; `fp8` (both ways); `fp8_bwd` (bf16 forward, fp8 backward); `mxfp8`.
            wgrad_precision: operands of the weight-gradient GEMMs, `bf16` or `fp8`.

        Raises:
            ConfigError: an unknown name, or an fp8 weight gradient where the backward is not fp8.
            UnsupportedError: `mxfp8`.
        """
        try:
            name = RecipeName(name)
        except ValueError:
            allowed = ", ".join(member.value for member in RecipeName)
            raise ConfigError(f"precision is {name!r}; it must be one of {allowed}.") from None
        if wgrad_precision not in ("bf16", "fp8"):
            raise ConfigError(f"wgrad_precision is {wgrad_precision!r}; it must be bf16 or fp8.")
        if name is RecipeName.MXFP8:
            raise UnsupportedError(
                "precision 'mxfp8' (1×32 blocks, power-of-two scales) runs on the block-scaled "
                "tensor cores of Blackwell and is not there yet; choose precision 'fp8' or 'bf16'."
            )
        if name is RecipeName.BF16 and wgrad_precision == "fp8":
            raise ConfigError(
                "wgrad_precision 'fp8' needs an fp8 backward, but precision is 'bf16'; "
                "choose precision 'fp8' or 'fp8_bwd', or wgrad_precision 'bf16'."
            )
        forward = FP8_GEMM if name is RecipeName.FP8 else BF16_GEMM
        backward = BF16_GEMM if name is RecipeName.BF16 else FP8_GEMM
        wgrad = FP8_WGRAD if wgrad_precision == "fp8" else BF16_GEMM
        return cls(
            name=name,
            gemm1=forward,
            gemm2=forward,
            dgrad2=backward,
            dgrad1=backward,
            wgrad2=wgrad,
            wgrad1=wgrad,
        )


@lru_cache
def get_recipe(name: RecipeName | str, wgrad_precision: str = "bf16") -> Recipe:
    """`Recipe.from_name`, cached."""
    return Recipe.from_name(name, wgrad_precision)
