"""The tables of a compiled round: fields are numbered without a gap, and all are filled."""

import ast
from pathlib import Path

import pytest
import torch

from kernels.compiled import job as j
from tests.kernels.compiled.decoder import CASES, LENGTHS, Rounds


def _fields(section: str) -> dict[str, int]:
    """Names and numbers that the section assigns, in the order of the source."""
    text = Path(j.__file__).read_text(encoding="utf-8")
    part = text.split(f"\n# {section}", 1)[1].split("\n# ", 1)[0]
    return {
        node.targets[0].id: node.value.value
        for node in ast.parse("# " + part).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }


@pytest.mark.parametrize(
    ("section", "last"), [("Job table", "SIZE"), ("Part table", "PART_SIZE"), ("Layer table", None)]
)
def test_fields_are_numbered_without_a_gap(section: str, last: str | None) -> None:
    names = list(_fields(section))
    end = names.index(last) + 1 if last else names.index("WEIGHTS") + 1
    numbers = list(_fields(section).values())[:end]
    assert numbers == list(range(end))


def test_the_sources_of_products_have_one_order() -> None:
    fields = (
        j.SOURCE_FLOATS,
        j.SOURCE_STRIDE,
        j.SOURCE_BYTES,
        j.SOURCE_BYTES_STRIDE,
        j.SOURCE_SCALES,
        j.SOURCE_CORRECTIONS,
    )
    layer = (j.WORK, j.WORK_STRIDE, j.QUANTIZED, j.QUANTIZED_STRIDE, j.SCALES, j.CORRECTIONS)
    experts = (
        j.GATHERED,
        j.GATHERED_STRIDE,
        j.GATHERED_BYTES,
        j.GATHERED_BYTES_STRIDE,
        j.GATHERED_SCALES,
        j.GATHERED_CORRECTIONS,
    )
    for first, own in ((j.WORK, layer), (j.GATHERED, experts)):
        assert tuple(first + field for field in fields) == own


def test_weights_of_all_parts_fit_into_a_row_of_the_layer_table() -> None:
    places = {
        j.WEIGHTS + j.WEIGHT_SIZE * part + field
        for part in (j.QKV, j.OUTPUT, j.GATE_UP, j.DOWN)
        for field in (j.PANELS, j.PANEL_SCALES, j.BIAS)
    }
    assert places == set(range(j.WEIGHTS, j.LAYER_SIZE))


def test_every_field_of_the_job_table_is_filled() -> None:
    """A field that is added but never written would be read as 0, an address of nothing."""
    for name, unused in (("window", range(j.EXPERTS, j.SIZE)), ("experts", ())):
        model = CASES[name]
        program = model.program()
        rounds = Rounds(model, program, LENGTHS)
        rounds.run([(seq, 0, length) for seq, length in enumerate(LENGTHS)])
        empty = (program._team.job == 0).nonzero().view(-1).tolist()
        assert empty == [j.QUIT, j.FORMAT, *unused]
        assert torch.all(program._parts[:, : j.TARGET_STRIDE + 1] != 0)


@pytest.mark.parametrize(("name", "phases"), [("small", j.PHASES), ("experts", j.ROUTED_PHASES)])
def test_a_layer_has_as_many_phases_as_the_job_runs(name: str, phases: int) -> None:
    """The last phase of the last layer must lie in the sync area, and no phase beyond it."""
    model = CASES[name]
    program = model.program()
    rounds = Rounds(model, program, [3])
    used = []
    run = program._team.run

    def spy(phases: int) -> None:
        run(phases)
        lines = program._team._sync.view(-1, j.PHASE_BYTES // j.INT64_BYTES)
        used.append((phases, int(lines.any(1).nonzero().max())))

    program._team.run = spy  # type: ignore[method-assign]
    rounds.run([(0, 0, 3)])
    layers = len(model.layers)
    assert used[0] == (phases * layers, phases * layers)
