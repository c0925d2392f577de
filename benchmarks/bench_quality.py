"""What a number format costs in quality: perplexity, and greedy tokens beside float32's.

    python -m benchmarks.bench_quality --threads 1 --output benchmarks/results

Perplexity is of `data/prose.txt`, in windows of --window tokens. Greedy agreement continues
the first half of each window: how many tokens are those of float32 until the first that differs.
Forced agreement is the share of the text's positions at which both would choose the same token.
"""

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from services.engine.compute.loader import ModelSource, load_model
from services.engine.compute.model_runner import ModelRunner
from services.engine.compute.sampling.sampling_inputs import Hidden
from services.engine.contract.config import EngineConfig
from services.engine.contract.runner import SequenceMetadata

TEXT = Path(__file__).parent / "data" / "prose.txt"
BLOCK = 32


@dataclass(frozen=True)
class Figure:
    """One number format beside float32."""

    dtype: str
    perplexity: float
    perplexity_ratio: float
    forced_agreement: float
    """Share of all positions of the text whose arg-max is float32's."""
    greedy_agreement: float
    """Share of continued tokens before the first that differs from float32's."""
    worst_cosine: float
    """Smallest cosine of a position's logits, centred, with float32's."""
    mean_cosine: float
    weights_mib: float


class Reader:
    """Logits of whole windows, and greedy continuations, of one number format."""

    def __init__(self, dtype: str, threads: int, source: ModelSource, length: int) -> None:
        config = EngineConfig(dtype=dtype, threads=threads, block_size=BLOCK)
        self._runner = ModelRunner(config, source)
        blocks = -(-length // BLOCK)
        self._table = tuple(range(1, blocks + 1))
        self._runner.allocate(blocks + 1)
        self.weights_bytes = self._runner.describe().weights_bytes

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[tokens, vocabulary] in one round.

        Every position is a sequence of one row on the same blocks: a layer writes all keys and
        values before a row attends.
        """
        batch = [
            SequenceMetadata(at, at, (token,), None, self._table, sample=True)
            for at, token in enumerate(tokens)
        ]
        return self._run(batch)

    def continued(self, tokens: Sequence[int], count: int) -> list[int]:
        """Greedy tokens after a prompt."""
        found: list[int] = []
        start, new = 0, tuple(tokens)
        for _ in range(count):
            meta = SequenceMetadata(0, start, new, None, self._table, sample=True)
            token = int(self._run([meta]).argmax())
            start, new = start + len(new), (token,)
            found.append(token)
        return found

    def _run(self, batch: Sequence[SequenceMetadata]) -> Tensor:
        hidden = self._runner.execute_main_model(0, batch, None)
        assert isinstance(hidden, Hidden)
        return hidden.logits


@dataclass(frozen=True)
class Reading:
    """What one format made of one window."""

    logits: Tensor
    greedy: list[int]


def read(reader: Reader, windows: Sequence[Sequence[int]], count: int) -> list[Reading]:
    """All windows; greedy tokens continue the first half of each."""
    return [
        Reading(reader.logits(window), reader.continued(window[: len(window) // 2], count))
        for window in windows
    ]


def loss(readings: Sequence[Reading], windows: Sequence[Sequence[int]]) -> float:
    """Mean negative log-likelihood of each token after a window's first."""
    losses = [
        cross_entropy(reading.logits[:-1], torch.tensor(window[1:]), reduction="none")
        for reading, window in zip(readings, windows, strict=True)
    ]
    return float(torch.cat(losses).mean())


def compare(
    dtype: str,
    weights_bytes: int,
    own: Sequence[Reading],
    base: Sequence[Reading],
    windows: Sequence[Sequence[int]],
) -> Figure:
    """One format's readings beside float32's."""
    perplexity, want = math.exp(loss(own, windows)), math.exp(loss(base, windows))
    pairs = list(zip(own, base, strict=True))
    same = [(a.logits.argmax(-1) == b.logits.argmax(-1)).float() for a, b in pairs]
    cosines = [cosine_similarity(_centred(a.logits), _centred(b.logits)) for a, b in pairs]
    kept = [_common(a.greedy, b.greedy) for a, b in pairs]
    return Figure(
        dtype=dtype,
        perplexity=perplexity,
        perplexity_ratio=perplexity / want,
        forced_agreement=float(torch.cat(same).mean()),
        greedy_agreement=sum(kept) / sum(len(b.greedy) for _, b in pairs),
        worst_cosine=float(torch.cat(cosines).min()),
        mean_cosine=float(torch.cat(cosines).mean()),
        weights_mib=weights_bytes / 2**20,
    )


def _centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(b))


def measure(options: argparse.Namespace) -> list[Figure]:
    """float32 first, then each format beside it; progress on stderr."""
    source = load_model(options.model)
    tokens = Tokenizer.from_buffer(source.text.tokenizer_json).encode(TEXT.read_text("utf-8")).ids
    size = options.window
    windows = [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]
    windows = windows[: options.windows or None]
    base: list[Reading] = []
    figures = []
    for dtype in ("float32", *options.dtypes):
        print(f"{dtype}: {len(windows)} windows …", file=sys.stderr, flush=True)
        reader = Reader(dtype, options.threads, source, size + options.count)
        own = read(reader, windows, options.count)
        base = base or own
        figures.append(compare(dtype, reader.weights_bytes, own, base, windows))
    return figures


def main() -> None:
    """Print a table; with --output also write a dated JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="a folder, a .gguf file or a known name")
    parser.add_argument("--dtypes", nargs="+", default=["int8", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--window", type=int, default=256, help="tokens read at a time")
    parser.add_argument("--windows", type=int, default=0, help="read only so many; 0 is all")
    parser.add_argument("--count", type=int, default=32, help="greedy tokens after a window's half")
    parser.add_argument("--output", type=Path, help="folder for the JSON file")
    options = parser.parse_args()
    figures = measure(options)
    for figure in figures:
        print(json.dumps(asdict(figure)))
    if options.output:
        result = {
            "benchmark": "bench_quality",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": "python -m benchmarks.bench_quality " + " ".join(sys.argv[1:]),
            "model": options.model or "smollm2-135m-instruct",
            "text": "benchmarks/data/prose.txt",
            "threads": options.threads,
            "cpu": platform.processor() or platform.machine(),
            "torch": version("torch"),
            "load_average": os.getloadavg()[0],
            "figures": [asdict(figure) for figure in figures],
        }
        path = options.output / f"{result['date'][:10]}-quality.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
