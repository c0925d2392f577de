"""Reads the `quantization_config` of the compressed-tensors format (llm-compressor)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.engine.contract.model_config import ModelFileError
from services.engine.model_files.json_keys import Keys

_SERVED: Mapping[str, tuple[tuple[str, int], ...]] = {
    "float-quantized": (("float", 8),),
    "int-quantized": (("int", 8),),
    "naive-quantized": (("float", 8), ("int", 8)),
    "pack-quantized": (("int", 4), ("int", 8)),
}
"""Kind and bits of numbers, by format."""


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """How the weights of some modules are stored."""

    targets: tuple[str, ...]
    """Module names, patterns that begin with "re:", or names of classes such as "Linear"."""
    format: str
    """A key of _SERVED."""
    kind: str
    """"float" or "int"."""
    bits: int
    symmetric: bool
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None: a scale per tensor or row."""
    ordered: bool = False
    """As quantisation.Gptq's; the tensor is `weight_g_idx`."""

    @property
    def label(self) -> str:
        """See quantisation.Float8."""
        block = f"-{self.block[0]}x{self.block[1]}" if self.block else ""
        return f"{self.format}-{self.kind}{self.bits}{block}"

    def names(self, module: str) -> bool:
        """Whether a target is this module's name, or a pattern that matches its beginning."""
        for target in self.targets:
            if target == module or module.endswith(f".{target}"):
                return True
            if target.startswith("re:") and re.match(target.removeprefix("re:"), module):
                return True
        return False


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The groups of a checkpoint, in the order of the file."""

    groups: tuple[WeightGroup, ...]

    @property
    def label(self) -> str:
        """See quantisation.Float8."""
        return "compressed-tensors-" + "+".join(sorted({group.label for group in self.groups}))

    def group_of(self, module: str) -> WeightGroup | None:
        """The group of a quantised module: one that names it, before one that names a class."""
        for group in self.groups:
            if group.names(module):
                return group
        of_class = (group for group in self.groups if "Linear" in group.targets)
        return next(of_class, None)


def compressed_tensors(keys: Keys) -> CompressedTensors:
    """Read the object.

    Raises:
        ModelFileError: a key is missing or wrong, or something is not served.
    """
    status = keys.get("quantization_status") or "compressed"
    if status not in ("compressed", "frozen"):  # older versions write compressed files as frozen
        raise ModelFileError(
            f"{keys.where}: quantization_status {status!r} is not supported, only 'compressed' and "
            "'frozen'"
        )
    sparse = keys.part("sparsity_config").get("format") or "dense"
    if sparse != "dense":
        raise ModelFileError(f"{keys.where}: sparsity_config: format {sparse!r} is not supported")
    if keys.get("transform_config"):
        raise ModelFileError(f"{keys.where}: transform_config is not supported")
    groups = keys.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelFileError(f"{keys.where}: config_groups is missing or empty")
    return CompressedTensors(tuple(_group(keys, name, raw) for name, raw in groups.items()))


def _group(keys: Keys, name: str, raw: Any) -> WeightGroup:
    where = f"{keys.where}: config_groups.{name}"
    if not isinstance(raw, dict) or not isinstance(raw.get("weights"), dict):
        raise ModelFileError(f"{where}: weights must be an object: nothing else is served")
    own = Keys(raw, where)
    form = own.get("format") or keys.get("format")
    if form not in _SERVED:
        raise ModelFileError(
            f"{where}: format {form!r} is not supported, only "
            f"{', '.join(repr(known) for known in _SERVED)}"
        )
    targets = own.items("targets")
    _check_targets(where, targets)
    weights = Keys(raw["weights"], f"{where}.weights")
    kind, bits = str(weights.get("type") or "int"), weights.count("num_bits")
    if (kind, bits) not in _SERVED[form]:
        raise ModelFileError(
            f"{where}.weights: num_bits {bits} of type {kind!r} is not supported with {form!r}"
        )
    return WeightGroup(
        targets=tuple(targets),
        format=str(form),
        kind=kind,
        bits=bits,
        symmetric=weights.flag("symmetric", default=True),
        block=_block(weights),
        ordered=weights.get("actorder") in ("group", "dynamic", True),
    )


def _check_targets(where: str, targets: list[Any]) -> None:
    for target in targets:
        if not isinstance(target, str):
            raise ModelFileError(f"{where}: targets must be strings, got {target!r}")
        if target.startswith("re:"):
            try:
                re.compile(target.removeprefix("re:"))
            except re.error as error:
                raise ModelFileError(f"{where}: targets: {target!r}: {error}") from error


def _block(weights: Keys) -> tuple[int, int] | None:
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy in ("tensor", "channel"):
        return None
    if strategy == "group":
        return 1, max(1, weights.count("group_size"))
    structure = weights.get("block_structure")
    if strategy == "block" and isinstance(structure, list) and len(structure) == 2:
        rows, columns = structure
        if isinstance(rows, int) and isinstance(columns, int) and min(rows, columns) > 0:
            return rows, columns
    raise ModelFileError(
        f"{weights.where}: strategy {strategy!r} with block_structure {structure!r} is not "
        "supported"
    )
