"""Keys and values in bfloat16: what is stored, and that attention reads exactly that."""

import pytest
import torch
from torch import Tensor

from kernels.compiled.packing import pack_bfloat16, pack_int8
from tests.kernels.compiled.decoder import CASES, LENGTHS, Model, Rounds
from tests.kernels.compiled.test_rounds import needs_bytes, replace_row

SHORT = torch.bfloat16


def _whole(rounds: Rounds, *, store: bool = True) -> list[Tensor]:
    return rounds.run([(seq, 0, length) for seq, length in enumerate(rounds.lengths)], store=store)


def _short(model: Model, threads: int = 1, pack=pack_bfloat16) -> Rounds:
    return Rounds(model, model.program(threads, pack), LENGTHS, SHORT)


def _in_chunks(rounds: Rounds, chunk: int) -> list[Tensor]:
    got: list[list[Tensor]] = [[] for _ in LENGTHS]
    for start in range(0, max(LENGTHS), chunk):
        parts = [
            (seq, start, min(length, start + chunk))
            for seq, length in enumerate(LENGTHS)
            if start < length
        ]
        for (seq, _, _), logits in zip(parts, rounds.run(parts), strict=True):
            got[seq].append(logits)
    return [torch.cat(parts) for parts in got]


@pytest.mark.parametrize("pack", [pack_bfloat16, pytest.param(pack_int8, marks=needs_bytes)])
@pytest.mark.parametrize("name", CASES)
def test_batch_chunks_and_threads_change_no_bit(name: str, pack) -> None:
    model = CASES[name]
    want = _whole(_short(model, 1, pack))
    for threads, chunk in ((1, 1), (3, 5), (3, 16)):
        rounds = _short(model, threads, pack)
        assert all(map(torch.equal, _in_chunks(rounds, chunk), want)), (threads, chunk)
        rounds.program.close()


@pytest.mark.parametrize("name", CASES)
def test_keys_and_values_are_rounded_to_the_nearest(name: str) -> None:
    """Those of the first layer depend on no attention, so they are those of float32, rounded."""
    model = CASES[name]
    long = Rounds(model, model.program(1, pack_bfloat16), LENGTHS)
    short = _short(model)
    _whole(long)
    _whole(short)
    assert torch.equal(short.caches[0], long.caches[0].bfloat16())
    assert not torch.equal(short.caches[0].float(), long.caches[0])


@pytest.mark.parametrize("chunk", [1, 5, 70])
@pytest.mark.parametrize("name", CASES)
def test_attention_reads_what_is_stored_to_the_bit(name: str, chunk: int) -> None:
    """As with caches in float32 that hold the same values, in narrow and in wide tiles."""
    model = CASES[name]
    short = _short(model)
    want = _in_chunks(short, chunk)
    long = Rounds(model, short.program, LENGTHS)
    for cache, given in zip(long.caches, short.caches, strict=True):
        cache.copy_(given)
    got = _whole(long, store=False)
    assert all(map(torch.equal, got, want))


def test_nan_is_stored_and_stays_in_its_sequence() -> None:
    model = CASES["small"]
    clean = _whole(_short(model))
    rounds = replace_row(_short(model), 2, 5)
    got = _whole(rounds)
    assert got[2][5].isnan().all()
    assert got[2][5:].isnan().any()
    assert rounds.caches[0].isnan().any()
    for seq in (0, 1, 3, 4):
        assert torch.equal(got[seq], clean[seq])


def test_caches_of_another_format_are_refused() -> None:
    model = CASES["small"]
    with pytest.raises(ValueError, match=r"torch\.float16.*float32 or bfloat16"):
        _whole(Rounds(model, model.program(), LENGTHS, torch.float16))
