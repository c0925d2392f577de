"""Converts the arguments of `LLM.generate` to lists of prompts and parameters."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral

from services.engine.contract.sampling_params import SamplingParams

Prompt = str | Sequence[int]
"""Text or token ids."""


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """One entry per prompt. Arrays (anything with `tolist`) are read as lists of numbers.

    Raises:
        TypeError: an item is neither text nor token ids; the message names it.
        ValueError: texts and single token ids are mixed.
    """
    if isinstance(prompts, str):
        return [prompts]
    listed = _listed("prompts", prompts)
    single = [_is_id(item) for item in listed]
    if listed and all(single):
        return [_token_ids("prompts", listed)]
    if any(single):
        raise ValueError(
            "prompts mixes texts and single token ids; a prompt is a text or a list of token ids"
        )
    return [
        item if isinstance(item, str) else _token_ids(at, _listed(at, item))
        for at, item in ((f"prompts[{index}]", item) for index, item in enumerate(listed))
    ]


def params_list(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One entry per prompt.

    Raises:
        TypeError: an item is not `SamplingParams`; the message names it.
        ValueError: their number differs from the number of prompts.
    """
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if not isinstance(given, list | tuple):
        raise TypeError(f"sampling_params must be SamplingParams or a list, got {_kind(given)}")
    for index, each in enumerate(given):
        if not isinstance(each, SamplingParams):
            raise TypeError(f"sampling_params[{index}] must be SamplingParams, got {_kind(each)}")
    if len(given) != count:
        raise ValueError(f"{len(given)} sampling_params for {count} prompts")
    return list(given)


def _listed(name: str, value: object) -> list[object]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a text or a list of token ids, got {_kind(value)}")
    return list(value)


def _token_ids(name: str, listed: list[object]) -> list[int]:
    ids = [int(item) for item in listed if isinstance(item, Integral) and _is_id(item)]
    if len(ids) != len(listed):
        index = next(at for at, item in enumerate(listed) if not _is_id(item))
        raise TypeError(f"{name}[{index}] must be a token id, got {_kind(listed[index])}")
    return ids


def _is_id(item: object) -> bool:
    return isinstance(item, Integral) and not isinstance(item, bool)


def _kind(value: object) -> str:
    return type(value).__name__
