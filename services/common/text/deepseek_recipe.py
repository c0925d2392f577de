"""DeepSeek's own library for chats of V4 models, which not every platform has, and its mark."""

from types import ModuleType

from services.common.errors import UnimplementedError

MARK = "｜DSML｜"
"""In each of its tags; a token of these models."""


def recipe() -> ModuleType:
    """The library.

    Raises:
        UnimplementedError: it is not installed here.
    """
    try:
        import deepseek_recipe
    except ImportError:
        raise UnimplementedError(
            "chats of DeepSeek V4 models need the package deepseek-recipe at the gateway "
            "(pip install deepseek-recipe)",
            reason="DEEPSEEK_RECIPE_MISSING",
        ) from None
    return deepseek_recipe
