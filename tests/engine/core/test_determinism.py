"""The determinism guarantee as a matrix: a request gives the same tokens in every cell.

Each test checks, in the rounds that the runner was given, that its cell's features did occur.
"""

import itertools
import json
from collections.abc import Iterator

import pytest

from services.engine.contract.core_link import CoreLink
from services.engine.contract.messages import AddRequest, CoreRequest
from services.engine.tiny_models import write_tiny_model as write_published
from tests.doubles.tiny_deepseek import DeepseekShape, write_tiny_deepseek
from tests.doubles.tiny_model import TinyShape, write_tiny_model
from tests.engine.core.determinism_cells import (
    CONSTRAINTS,
    NAMES,
    PROMPT,
    RESUMED_AFTER,
    SAMPLING,
    Answer,
    Cell,
    DeterminismCells,
    all_cells,
    check_one_answer,
    covering_cells,
)

# The first constraint waits for a process that loads xgrammar.
pytestmark = pytest.mark.timeout(240)
WHOLE = pytest.mark.whole


COVERING = covering_cells()
EVERY_CELL = [
    pytest.param(*names, id="-".join(map(str, names)), marks=() if names in COVERING else WHOLE)
    for names in itertools.product(all_cells(), SAMPLING, CONSTRAINTS)
]
"""All 128. `make verify` has those that cover any three choices, `-m whole` the rest."""


def test_the_covering_cells_have_any_three_choices_in_all_eight_ways() -> None:
    rows = [
        (*vars(cell).values(), sampling == "seeded", constraint == "plain")
        for cell, sampling, constraint in COVERING
    ]
    assert len(rows) == 16
    for columns in itertools.combinations(range(7), 3):
        assert len({tuple(row[column] for column in columns) for row in rows}) == 8


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeterminismCells]:
    made = DeterminismCells(
        str(write_tiny_model(tmp_path_factory.mktemp("cells"))), letters=60, most=160
    )
    yield made
    made.close()


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("cell", all_cells(), ids=str)
def test_one_answer_in_every_cell(
    cells: DeterminismCells, cell: Cell, sampling: str, constraint: str
) -> None:
    check_one_answer(cells, cell, sampling, constraint)


@pytest.fixture(
    scope="module",
    params=[pytest.param("deepseek_v3", marks=pytest.mark.verify), "deepseek_v32"],
)
def latent_cells(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeterminismCells]:
    """Latent attention, in V3.2 to 20 of the prompt's 72 positions; one layer of experts."""
    shape = DeepseekShape(
        kind=request.param, num_layers=2, num_experts=4, groups=2, top_groups=1, top_k=2
    )
    folder = write_tiny_deepseek(tmp_path_factory.mktemp("latent") / "m", shape)
    made = DeterminismCells(str(folder), letters=60, most=160)
    yield made
    made.close()


def test_latent_attention_gives_one_answer_where_everything_happens(
    latent_cells: DeterminismCells,
) -> None:
    check_one_answer(latent_cells, Cell(*[True] * 5), "seeded", "plain")
    assert len(set(latent_cells.reference("seeded", "plain").tokens)) > 8


@pytest.mark.verify
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("cell", "sampling", "constraint"), EVERY_CELL)
def test_latent_attention_gives_one_answer_in_every_cell(
    latent_cells: DeterminismCells, cell: Cell, sampling: str, constraint: str
) -> None:
    check_one_answer(latent_cells, cell, sampling, constraint)


PAIRWISE = [
    Cell(batch=True, hit=True, chunked=True, preempted=True),
    Cell(batch=True, chunked=True, continued=True),
    Cell(batch=True, preempted=True),
    Cell(hit=True, chunked=True, continued=True),
    Cell(hit=True, preempted=True, continued=True),
]
"""With the cell of no feature: every two features, each on and off, in all four ways."""


@pytest.fixture(scope="module")
def v4_cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeterminismCells]:
    """DeepSeek V4, whose state is in slots; its third layer compresses 128 positions."""
    folder = write_published(tmp_path_factory.mktemp("v4") / "m", "deepseek_v4")
    made = DeterminismCells(str(folder), letters=60, most=160)
    yield made
    made.close()


@pytest.mark.verify
@pytest.mark.timeout(1800)
def test_v4_gives_one_answer_where_everything_happens(v4_cells: DeterminismCells) -> None:
    check_one_answer(v4_cells, Cell(*[True] * 5), "seeded", "plain")
    assert len(set(v4_cells.reference("seeded", "plain").tokens)) > 8


@pytest.mark.verify
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("cell", PAIRWISE, ids=str)
def test_v4_gives_one_answer_in_every_pair_of_features(
    v4_cells: DeterminismCells, cell: Cell, sampling: str
) -> None:
    check_one_answer(v4_cells, cell, sampling, "plain")


def test_the_answers_differ_from_one_another(cells: DeterminismCells) -> None:
    answers = [cells.reference(*name).tokens for name in NAMES]
    assert len(set(map(tuple, answers))) == len(answers)
    assert all(len(set(tokens)) > 8 for tokens in answers)
    for sampling in SAMPLING:
        assert cells.reference(sampling, "json_schema").reason == "GRAMMAR_COMPLETE"
        text = cells.tokenizer.decode(cells.reference(sampling, "json_schema").tokens)
        assert 60 <= len(json.loads(text)["w"]) <= 64


async def test_another_process_resumes_all_four_answers(cells: DeterminismCells) -> None:
    wanted = {"/".join(name): cells.reference(*name) for name in NAMES}
    link = CoreLink()
    await link.start(Cell(batch=True, chunked=True).config(cells.model))
    try:
        link.send(
            [
                AddRequest(
                    "/".join(name),
                    CoreRequest(
                        prompt_token_ids=PROMPT,
                        params=cells.params(*name),
                        continued=(tuple(cells.reference(*name).tokens[:RESUMED_AFTER]),),
                    ),
                )
                for name in NAMES
            ]
        )
        got = {key: Answer(want.tokens[:RESUMED_AFTER]) for key, want in wanted.items()}
        async for report in link:
            assert not report.failures
            for output in report.outputs:
                got[output.request_key].tokens += output.token_ids
                got[output.request_key].reason = output.finish_reason
            if all(answer.reason for answer in got.values()):
                break
    finally:
        await link.stop()
    assert got == wanted


EXPERTS = TinyShape(kind="qwen3_moe", seed=4, tie_embeddings=False)
FEW_CELLS = [Cell(batch=True), Cell(hit=True, chunked=True), Cell(True, True, True, True, True)]
FEW_CELLS.append(Cell(preempted=True, continued=True))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def expert_cells(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeterminismCells]:
    folder = write_tiny_model(tmp_path_factory.mktemp("expert-cells"), EXPERTS)
    made = DeterminismCells(str(folder), letters=60, most=160, dtype=request.param)
    yield made
    made.close()


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("cell", FEW_CELLS, ids=str)
def test_experts_give_one_answer_in_every_cell(
    expert_cells: DeterminismCells, cell: Cell, sampling: str
) -> None:
    check_one_answer(expert_cells, cell, sampling, "plain")


@pytest.mark.verify
@pytest.mark.parametrize(("cell", "sampling", "constraint"), EVERY_CELL)
def test_experts_give_one_answer_in_all_cells(
    expert_cells: DeterminismCells, cell: Cell, sampling: str, constraint: str
) -> None:
    check_one_answer(expert_cells, cell, sampling, constraint)


@pytest.mark.verify
@pytest.mark.model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("cell", "sampling", "constraint"), EVERY_CELL)
def test_a_real_model_gives_one_answer_in_every_cell(
    real_cells: DeterminismCells, cell: Cell, sampling: str, constraint: str
) -> None:
    check_one_answer(real_cells, cell, sampling, constraint)


@pytest.fixture(scope="module")
def real_cells() -> Iterator[DeterminismCells]:
    made = DeterminismCells("smollm2-135m-instruct", letters=400, most=72)
    yield made
    made.close()
