"""Our whole engine as a side: scheduler, runner, sampler, results; no server."""

import sys
from importlib.metadata import version

from benchmarks.bench_engine.protocol import answer, through_generate
from services.engine.contract.sampling_params import SamplingParams
from services.engine.offline.llm import LLM


def main() -> None:
    """Arguments: model or "", number format, threads, sequences and tokens of a round, 1 for
    deterministic."""
    model, dtype, threads, seqs, tokens, deterministic = sys.argv[1:]
    with LLM(
        model,
        dtype=dtype,
        threads=int(threads),
        max_num_seqs=int(seqs),
        max_num_batched_tokens=int(tokens),
        kv_memory="1GiB",
        prefix_cache=False,
        deterministic=deterministic == "1",
    ) as llm:

        def generate(prompts, length):
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, seed=0)
            outputs = llm.generate(prompts, params)
            if any(len(output.choices[0].token_ids) != length for output in outputs):
                raise RuntimeError("an answer is shorter than requested")

        answer({"torch": version("torch")}, through_generate(generate))


if __name__ == "__main__":
    main()
