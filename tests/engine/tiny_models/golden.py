"""What a reference makes of the folders that the tool writes; no test needs transformers.

    python -m tests.engine.tiny_models.golden [ARCH ...]

writes tests/data/tiny_tool_golden.json: the entries of these architectures, or of all, anew.

Each entry has the digest of the weights, the ids of a chat and of a text, and greedy tokens up to
the first step whose two best logits are closer than MIN_MARGIN. The reference is transformers, and
of DeepSeek V4.1, which it has not, the oracle in `tests/engine/compute/models/v41_oracle`.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from services.common.text import template_of
from services.engine.model_files import load_text_assets
from services.engine.tiny_models import DECLARATIONS, write_tiny_model

FILE = Path(__file__).parents[2] / "data" / "tiny_tool_golden.json"
CHAT = [{"role": "user", "content": "What is the capital of France? Zürich?"}]
TEXT = "Once upon a time there was a small machine, 日本."
LONGER = {"deepseek_v4": 8}
"""A third prompt repeats the text so many times: entries of some layers stand for 128 positions."""
NEW_TOKENS = 32
MIN_MARGIN = 0.001
Logits = Callable[[Sequence[int]], Tensor]
"""Logits [vocabulary] after a sequence of tokens."""


def digest(folder: Path) -> str:
    """Of the weights and of everything that turns text into ids."""
    found = hashlib.sha256()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        found.update((folder / name).read_bytes())
    return found.hexdigest()


def _entry(folder: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    logits = oracle_logits(folder) if folder.name == "deepseek_v41" else _logits(folder)
    texts = [TEXT] if folder.name not in LONGER else [TEXT, TEXT * LONGER[folder.name]]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    if tokenizer.chat_template:
        rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        prompts.insert(0, tokenizer.encode(rendered, add_special_tokens=False))
    else:
        prompts.insert(0, template_of(load_text_assets(str(folder))).encode(CHAT))
    return {
        "digest": digest(folder),
        "prompts": prompts,
        "outputs": [_greedy(logits, prompt) for prompt in prompts],
    }


def _logits(folder: Path) -> Logits:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(ids: Sequence[int]) -> Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, -1]

    return logits


def oracle_logits(folder: Path) -> Logits:
    """Of a DeepSeek V4.1, by the oracle in float64."""
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    from tests.engine.compute.models.v41_oracle import engram
    from tests.engine.compute.models.v41_oracle.oracle import Oracle, State
    from tests.engine.compute.models.v41_oracle.published import shape_of

    weights = load_file(folder / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = range(tokenizer.get_vocab_size())
    compressed = engram.compressed_ids(
        [tokenizer.decode([token], skip_special_tokens=False) for token in tokens],
        [tokenizer.id_to_token(token) for token in tokens],
    )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    oracle = Oracle(
        shape_of(config["text_config"]),
        {name: value.double() for name, value in weights.items()},
        compressed,
    )
    done: list[int] = []
    state = State()

    def logits(ids: Sequence[int]) -> Tensor:
        """Computes what `ids` has beyond the call before, or all of another sequence."""
        nonlocal done, state
        if not done or list(ids[: len(done)]) != done:
            done, state = [], State()
        rows, state = oracle.forward(ids[len(done) :], state)
        done = list(ids)
        return rows[-1]

    return logits


def _greedy(logits: Logits, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + NEW_TOKENS:
        best = logits(ids).topk(2)
        if best.values[0] - best.values[1] < MIN_MARGIN:
            break
        ids.append(int(best.indices[0]))
    return ids[len(prompt) :]


def main() -> None:
    """Write the file."""
    import torch

    torch.set_num_threads(1)
    entries = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    with tempfile.TemporaryDirectory() as root:
        for name in sys.argv[1:] or DECLARATIONS:
            entries[name] = _entry(write_tiny_model(Path(root) / name, name))
            print(name, [len(output) for output in entries[name]["outputs"]], flush=True)
    ordered = {name: entries[name] for name in DECLARATIONS if name in entries}
    FILE.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
