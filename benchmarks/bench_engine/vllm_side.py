"""vLLM's CPU engine as a side; a script for its own Python, which has nothing of ours."""

import os
import sys
from importlib.metadata import version

from protocol import answer, through_generate

# The engine runs in this process, so that no time goes into a second one and memory is read once.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    """Arguments: folder, number format, threads, sequences and tokens of a round, 1 to compile."""
    folder, dtype, threads, seqs, tokens, compiles = sys.argv[1:]
    os.environ["OMP_NUM_THREADS"] = threads
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{int(threads) - 1}"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=int(seqs),
        max_num_batched_tokens=int(tokens),
        enable_prefix_caching=False,
        enforce_eager=compiles != "1",
        skip_tokenizer_init=True,
    )

    def generate(prompts, length):
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        if any(len(output.outputs[0].token_ids) != length for output in outputs):
            raise RuntimeError("an answer is shorter than requested")

    answer({"vllm": version("vllm"), "torch": version("torch")}, through_generate(generate))


if __name__ == "__main__":
    main()
