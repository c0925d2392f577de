"""The same work in transformers: our weights, sdpa attention, its own cache, greedy."""

import sys
import time
from importlib.metadata import version

import torch
import transformers

from benchmarks.bench_engine.protocol import answer, make_prompts


class Side:
    """A model of transformers out of an exported folder."""

    def __init__(self, folder: str, dtype: str) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    @torch.inference_mode()
    def measure(self, case: dict) -> tuple[int, float]:
        """Prefill of the batch, or the steps after it."""
        ids = torch.tensor(make_prompts(case["batch"], case["prompt"], case["seed"]))
        started = time.perf_counter()
        tokens, cache = self._forward(ids, None)
        if case["case"] == "prefill":
            return ids.numel(), time.perf_counter() - started
        started = time.perf_counter()
        for _ in range(case["steps"]):
            tokens, cache = self._forward(tokens, cache)
        return case["batch"] * case["steps"], time.perf_counter() - started

    def _forward(self, ids, cache):
        result = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return result.logits[:, -1].argmax(-1, keepdim=True), result.past_key_values


def main() -> None:
    """Arguments: folder, number format, threads."""
    folder, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    versions = {name: version(name) for name in ("torch", "transformers")}
    answer(versions, Side(folder, dtype).measure)


if __name__ == "__main__":
    main()
