"""Recipes: the operand formats a precision's name stands for."""

import pytest

from titan_megamoe.errors import ConfigError, MegaMoEError, UnsupportedError
from titan_megamoe.precision import Format, GemmFormats, Recipe, RecipeName, get_recipe

BF16 = GemmFormats(Format.BF16, Format.BF16)
BLOCKWISE = GemmFormats(Format.ACT_1X128, Format.WEIGHT_128X128)
TOKENS = GemmFormats(Format.TOKENS_128X1, Format.TOKENS_128X1)


@pytest.mark.parametrize(
    ("name", "wgrad", "forward", "dgrad", "weight_grad"),
    [
        ("bf16", "bf16", BF16, BF16, BF16),
        ("fp8", "bf16", BLOCKWISE, BLOCKWISE, BF16),
        ("fp8", "fp8", BLOCKWISE, BLOCKWISE, TOKENS),
        ("fp8_bwd", "bf16", BF16, BLOCKWISE, BF16),
        ("fp8_bwd", "fp8", BF16, BLOCKWISE, TOKENS),
    ],
)
def test_a_gemm_gets_the_operand_format_of_another(name, wgrad, forward, dgrad, weight_grad):
    recipe = get_recipe(name, wgrad)
    assert (recipe.gemm1, recipe.gemm2) == (forward, forward)
    assert (recipe.dgrad2, recipe.dgrad1) == (dgrad, dgrad)
    assert (recipe.wgrad2, recipe.wgrad1) == (weight_grad, weight_grad)
    assert recipe.fp8_forward == (name == "fp8")
    assert recipe.fp8_backward == (name != "bf16")
    assert recipe.fp8_wgrad == (wgrad == "fp8")
    assert Recipe.from_name(RecipeName(name), wgrad) == recipe


def test_mxfp8_runs_as_something_else():
    with pytest.raises(UnsupportedError, match="mxfp8.*Blackwell.*choose") as caught:
        get_recipe("mxfp8")
    assert isinstance(caught.value, MegaMoEError)


@pytest.mark.parametrize(
    ("name", "wgrad", "message"),
    [
        ("fp4", "bf16", "must be one of bf16, fp8, fp8_bwd, mxfp8"),
        ("fp8", "fp4", "must be bf16 or fp8"),
        ("bf16", "fp8", "needs an fp8 backward"),
    ],
)
def test_a_wrong_name_is_accepted_or_silently_replaced(name, wgrad, message):
    with pytest.raises(ConfigError, match=message):
        get_recipe(name, wgrad)


def test_a_recipe_can_be_changed_behind_its_users():
    with pytest.raises(AttributeError):
        get_recipe("bf16").gemm1 = BLOCKWISE  # type: ignore[misc]


def test_the_config_and_the_recipes_disagree_on_names():
    from titan_megamoe.config import PRECISIONS

    assert set(PRECISIONS) == {member.value for member in RecipeName}
