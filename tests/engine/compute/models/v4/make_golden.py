"""Writes golden.npz: what transformers computes for the tiny DeepSeek V4.

Run it with transformers 5.24: `python -m tests.engine.compute.models.v4.make_golden`. It loads the
published tensor names through transformers' own table of names.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import DeepseekV4ForCausalLM

from tests.doubles.tiny_v4 import write_tiny_v4

FILE = Path(__file__).with_name("golden.npz")
PROMPTS = (45, 70)
"""Lengths of the prompts; the second is longer than YaRN's original length."""
NEW_TOKENS = 24


def main() -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as folder:
        model, found = DeepseekV4ForCausalLM.from_pretrained(
            write_tiny_v4(Path(folder)), dtype=torch.float32, output_loading_info=True
        )
    assert not any(found.values()), found
    arrays = {}
    for number, length in enumerate(PROMPTS):
        ids = np.random.PCG64(number).random_raw(length) % 96
        prompt = torch.tensor(ids.astype(np.int64)).unsqueeze(0)
        with torch.no_grad():
            logits = model(prompt, use_cache=False).logits[0]
            tokens = prompt
            for _ in range(NEW_TOKENS):
                last = model(tokens, use_cache=False).logits[0, -1]
                tokens = torch.cat((tokens, last.argmax().view(1, 1)), dim=1)
        arrays[f"prompt_{number}"] = prompt[0].numpy()
        arrays[f"logits_{number}"] = logits.numpy()
        arrays[f"greedy_{number}"] = tokens[0, length:].numpy()
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
