"""Rounds that run as one compiled job, compared with float64; and which threads run them."""

import gc
import os
import subprocess
import sys
import threading
from copy import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels import dispatch
from kernels.compiled import machine as jit_machine
from kernels.compiled.machine import PANEL_VECTORS, machine
from kernels.compiled.packing import pack_bfloat16, pack_floats, pack_int8
from kernels.compiled.step import run_thread
from kernels.compiled.tiles import PANEL
from tests.kernels.compiled.decoder import CASES, LENGTHS, SMALL, Model, Rounds

needs_bytes = pytest.mark.skipif(
    not (machine().byte_products or machine().byte_pairs), reason="this CPU has no byte products"
)


def _whole(rounds: Rounds) -> list[Tensor]:
    return rounds.run([(seq, 0, length) for seq, length in enumerate(rounds.lengths)])


@pytest.mark.parametrize("name", CASES)
def test_a_round_matches_plain_arithmetic(name: str) -> None:
    model = CASES[name]
    rounds = Rounds(model, model.program(), LENGTHS)
    for seq, got in enumerate(_whole(rounds)):
        want = model.plain(rounds.embedded(seq)).float()
        torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("pack", [pack_floats, pytest.param(pack_int8, marks=needs_bytes)])
@pytest.mark.parametrize("name", CASES)
def test_batch_chunks_and_threads_change_no_bit(name: str, pack) -> None:
    model = CASES[name]
    want = _whole(Rounds(model, model.program(1, pack), LENGTHS))
    for threads in (1, 3):
        rounds = Rounds(model, model.program(threads, pack), LENGTHS)
        for chunk in (1, 5, 16):
            got: list[list[Tensor]] = [[] for _ in LENGTHS]
            for start in range(0, max(LENGTHS), chunk):
                parts = [
                    (seq, start, min(length, start + chunk))
                    for seq, length in enumerate(LENGTHS)
                    if start < length
                ]
                for (seq, _, _), logits in zip(parts, rounds.run(parts), strict=True):
                    got[seq].append(logits)
            for seq, parts_of in enumerate(got):
                assert torch.equal(torch.cat(parts_of), want[seq]), (threads, chunk, seq)
        rounds.program.close()


def test_a_thread_that_comes_late_finds_nothing_to_do() -> None:
    """It runs the whole job after the others, which grouped the rows of a later layer meanwhile."""
    model = copy(CASES["experts"])
    first, second = model.layers
    same = torch.zeros_like(first.router)  # all rows choose the same experts
    model.layers = [replace(first, router=same), second]
    rounds = Rounds(model, model.program(1), LENGTHS)
    _whole(rounds)
    counts = rounds.program.expert_rows()
    assert (counts[0] > 0).sum() < (counts[1] > 0).sum()
    program = rounds.program
    run = program._team.run

    def run_and_come_late(phases: int) -> None:
        run(phases)
        job = program._team.job
        late = threading.Thread(target=run_thread, args=(job.data_ptr(), 0, 0), daemon=True)
        late.start()
        late.join(20)
        assert not late.is_alive(), "it waits for pieces that nobody takes"

    want = _whole(rounds)
    program._team.run = run_and_come_late
    for got, logits in zip(_whole(rounds), want, strict=True):
        assert torch.equal(got, logits)


def _round_weights(model: Model) -> Model:
    """The same model with the weights of its products rounded to bfloat16."""

    def rounded(weight: Tensor) -> Tensor:
        return weight.bfloat16().float()

    made = copy(model)
    made.head = rounded(model.head)
    names = ("qkv", "output", "gate_up", "down")
    made.layers = [
        replace(layer, **{name: rounded(getattr(layer, name)) for name in names})
        for layer in model.layers
    ]
    return made


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_float32_with_rounded_weights_to_the_bit(name: str) -> None:
    """So all that holds for float32 in any company holds for bfloat16."""
    model = CASES[name]
    want = _whole(Rounds(model, _round_weights(model).program(), LENGTHS))
    got = _whole(Rounds(model, model.program(3, pack_bfloat16), LENGTHS))
    assert all(map(torch.equal, want, got))
    assert not torch.equal(got[0], _whole(Rounds(model, model.program(), LENGTHS))[0])


@needs_bytes
@pytest.mark.parametrize("name", CASES)
def test_bytes_stay_near_floats(name: str) -> None:
    model = CASES[name]
    floats = _whole(Rounds(model, model.program(), LENGTHS))
    byted = _whole(Rounds(model, model.program(1, pack_int8), LENGTHS))
    for want, got in zip(floats, byted, strict=True):
        assert not torch.equal(want, got)
        assert (want - got).std() < 0.05 * want.std()


@pytest.mark.parametrize("pack", [pack_floats, pack_bfloat16])
@pytest.mark.parametrize("name", ["small", "experts"])
def test_nan_stays_in_its_sequence(name: str, pack) -> None:
    model = CASES[name]
    clean = _whole(Rounds(model, model.program(1, pack), LENGTHS))
    rounds = Rounds(model, model.program(1, pack), LENGTHS)
    ill = replace_row(rounds, 2, 5)
    got = ill.run([(seq, 0, length) for seq, length in enumerate(LENGTHS)])
    assert got[2][5].isnan().all()
    assert got[2][5:].isnan().any()
    for seq in (0, 1, 3, 4):
        assert torch.equal(got[seq], clean[seq])
    healthy = _whole(Rounds(model, rounds.program, LENGTHS))  # its buffers have held NaN
    assert all(map(torch.equal, clean, healthy))


def test_the_rows_of_each_expert_are_counted() -> None:
    model = CASES["experts"]
    program = model.program(3)
    _whole(Rounds(model, program, LENGTHS))
    counts = program.expert_rows()
    assert counts.sum(1).tolist() == [sum(LENGTHS) * model.shape.routed.top_k] * 2
    chosen = program._experts._chosen[: sum(LENGTHS)]  # of the last layer
    assert counts[1].tolist() == torch.bincount(chosen.flatten(), minlength=9).tolist()
    assert all(len(set(row)) == len(row) for row in chosen.tolist())
    assert CASES["small"].program().expert_rows() is None


def replace_row(rounds: Rounds, seq: int, row: int) -> Rounds:
    """The same rounds with a NaN in one input of one sequence."""
    own = rounds.embedded

    def embedded(which: int) -> Tensor:
        values = own(which).clone()
        if which == seq:
            values[row, 3] = float("nan")
        return values

    rounds.embedded = embedded  # type: ignore[method-assign]
    return rounds


def test_threads_end_with_their_program() -> None:
    def helpers() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("kernel-")}

    before = helpers()
    model = CASES["small"]
    program = model.program(3)
    assert len(helpers() - before) == 2
    want = _whole(Rounds(model, program, LENGTHS))
    program.close()
    program.close()
    assert helpers() <= before
    late = _whole(Rounds(model, program, LENGTHS))
    assert all(map(torch.equal, want, late))
    program = model.program(2)
    assert len(helpers() - before) == 1
    del program
    gc.collect()
    assert helpers() <= before


def test_a_round_without_rows_does_nothing() -> None:
    model = CASES["small"]
    logits = model.program().logits(torch.zeros(0, SMALL.hidden))
    assert logits.shape == (0, SMALL.vocabulary)


@pytest.mark.verify
def test_a_processor_with_shorter_vectors_is_served() -> None:
    """This file again, compiled as for a Haswell: 8 lanes, 16 registers, no byte products."""
    features = {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c,+bmi,+bmi2",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not verify", __file__]
    done = subprocess.run(
        [*command, "-k", "plain or batch_chunks or nan or configured"],
        env=os.environ | features,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout


def test_configured_processor_features_are_used() -> None:
    if "NUMBA_CPU_FEATURES" in os.environ:
        assert (machine().lanes, machine().byte_products) == (8, False)
    columns = PANEL_VECTORS * machine().lanes
    assert columns == PANEL


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "found"),
    [
        ("cpu", "float32", (64, 32), "jit"),
        ("cpu", "float32", (8, 4), "jit"),
        ("cpu", "float32", (8, 1), None),
        ("cpu", "float32", (10, 16), None),
        ("cpu", "bfloat16", (64, 32), "jit-bf16-kv16"),
        ("cpu", "float16", (64, 32), None),
        ("cuda", "float32", (64, 32), None),
    ],
)
def test_which_rounds_are_compiled(
    device: str, dtype: str, sizes: tuple, found: str | None
) -> None:
    assert dispatch.compiled_set(device, dtype, sizes) == found


def test_a_machine_without_byte_products_uses_torch(monkeypatch) -> None:
    plain = replace(machine(), byte_products=False)
    monkeypatch.setattr(jit_machine, "machine", lambda: plain)
    assert dispatch.compiled_set("cpu", "int8", (64, 32)) is None
    monkeypatch.setattr(jit_machine, "usable", lambda: False)
    assert dispatch.compiled_set("cpu", "float32", (64, 32)) is None
