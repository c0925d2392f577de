"""Golden tokens and logits from transformers, which no test needs: run it again only to renew them.

    python scripts/make_golden.py tests/data [--only tiny_qwen3_golden.json]

Writes smollm2_golden.json (greedy float32 tokens of the default model, up to the first step whose
two best logits are closer than MIN_MARGIN), tiny_llama_golden.json (logits of tiny models) and
tiny_qwen3_golden.json and tiny_variants_golden.json (logits and greedy tokens of tiny models: with
and without experts; biases, windows and scaled rotary frequencies), and tiny_deepseek_golden.json
(the same for DeepSeek's models, whose logits are closer to one another).
The weights come from our own GGUF reader, whose first three answers were checked against
transformers' own reader.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer

from services.engine.compute.loader import load_model
from tests.doubles.tiny_deepseek import DeepseekShape, write_tiny_deepseek
from tests.doubles.tiny_model import TinyShape, write_tiny_model
from tests.doubles.tiny_published import PUBLISHED, write_published

MIN_MARGIN = 0.02
CLOSE_MARGIN = 0.002
"""Of models whose logits are compared within 1e-4."""
NEW_TOKENS = 24
CODE = '''def median(values: list[float]) -> float:
    """The middle of the sorted values."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

'''
STORY = (
    "The lighthouse keeper wrote down the weather every evening. On the first day the wind came "
    "from the north and the sea was grey. On the second day two ships passed, and one of them "
    "lowered its flag. On the third day there was fog, and he lit the lamp before noon. "
)
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
PROMPTS = (
    "Once upon a time there was",
    "The three primary colours are",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at 100 degrees Celsius because",
    "La capitale de la France est",
    "Die Hauptstadt von Österreich ist",
    "El gato se sentó en la alfombra y",
    "日本の首都は",
    "Москва является столицей",
    CHAT.format("Write one sentence about the sea."),
    CHAT.format("List three uses for a paper clip."),
    CHAT.format("What is 12 times 12?"),
    CHAT.format("Translate to French: The weather is nice today."),
    CODE + "def mean(values: list[float]) -> float:\n",
    CODE * 3 + "def variance(values: list[float]) -> float:\n",
    "SELECT name, COUNT(*) FROM orders JOIN customers ON orders.customer_id =",
    STORY + "On the fourth day",
    STORY * 3 + "On the last day",
    STORY * 7 + "On the last day",
    CHAT.format("Summarise this text in one sentence.\n\n" + STORY * 7),
)


def main() -> None:
    """Write both files into the folder given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", help="write this file alone")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    transformers.logging.disable_progress_bar()
    makers: dict[str, Callable[[], dict]] = {
        "tiny_llama_golden.json": tiny_golden,
        "tiny_qwen3_golden.json": lambda: shapes_golden(QWEN3_SHAPES),
        "tiny_variants_golden.json": lambda: shapes_golden(VARIANT_SHAPES),
        "tiny_published_golden.json": published_golden,
        "tiny_deepseek_golden.json": deepseek_golden,
        "smollm2_golden.json": lambda: smollm2_golden(args.folder / "smollm2_first_golden.json"),
    }
    for name, make in makers.items():
        if args.only in (None, name):
            _write(args.folder / name, make())


def smollm2_golden(first: Path) -> dict:
    """Greedy tokens of all prompts; `first` holds the three made with transformers' own reader."""
    source = load_model("")
    own = source.config
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=own.vocab_size,
            hidden_size=own.hidden_size,
            intermediate_size=own.intermediate_size,
            num_hidden_layers=own.num_layers,
            num_attention_heads=own.num_heads,
            num_key_value_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            max_position_embeddings=own.max_position,
            rms_norm_eps=own.rms_norm_eps,
            rope_theta=own.rope_theta,
            rope_parameters={"rope_type": "default", "rope_theta": own.rope_theta},
            tie_word_embeddings=True,
        )
    ).eval()
    left = model.load_state_dict(source.weights, strict=False)
    if left.unexpected_keys or set(left.missing_keys) - {"lm_head.weight"}:
        raise SystemExit(f"weights do not fit: {left}")
    model.tie_weights()
    tokenizer = Tokenizer.from_str(source.text.tokenizer_json.decode())
    items = json.loads(first.read_text(encoding="utf-8"))["items"]
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        output, margin = greedy(model, ids, source.eos_token_ids)
        print(
            len(ids), len(output), f"{margin:.3f}", repr(tokenizer.decode(output))[:80], flush=True
        )
        items.append({"prompt_ids": ids, "output_ids": output, "min_margin": margin})
    return {**versions(), "revision": source.revision, "min_margin": MIN_MARGIN, "items": items}


def greedy(
    model: transformers.PreTrainedModel,
    ids: list[int],
    eos: tuple[int, ...],
    least: float = MIN_MARGIN,
) -> tuple:
    """Tokens and their least margin over the second best."""
    output, margin, past = [], float("inf"), None
    inputs = torch.tensor([ids])
    while len(output) < NEW_TOKENS:
        result = model(inputs, cache=past, use_cache=True, logits_to_keep=1)
        best = result.logits[0, -1].topk(2)
        gap = (best.values[0] - best.values[1]).item()
        if gap < least:
            break
        margin, past = min(margin, gap), result.cache
        output.append(int(best.indices[0]))
        if output[-1] in eos:
            break
        inputs = best.indices[:1].unsqueeze(0)
    return output, margin


def tiny_golden() -> dict:
    """Logits of all positions of one prompt, and greedy tokens, per tiny model."""
    shapes = {
        "tied": TinyShape(),
        "untied_llama3": TinyShape(seed=1, tie_embeddings=False, llama3_rope=True),
    }
    models = {}
    for name, shape in shapes.items():
        with tempfile.TemporaryDirectory() as folder:
            write_tiny_model(Path(folder), shape)
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        prompt = [(7 * index + index * index) % 256 for index in range(200)]
        logits = model(torch.tensor([prompt])).logits[0]
        kept = [0, 1, 63, 64, 127, 199]
        models[name] = {
            "prompt_ids": prompt,
            "positions": kept,
            "logits": [[round(v, 5) for v in logits[p].tolist()] for p in kept],
        }
    return {**versions(), "models": models}


QWEN3_SHAPES = {
    "qwen3": TinyShape(kind="qwen3"),
    "qwen3_untied": TinyShape(kind="qwen3", seed=3, tie_embeddings=False, num_heads=4),
    "qwen3_moe": TinyShape(kind="qwen3_moe", seed=4, tie_embeddings=False),
    "qwen3_moe_mixed": TinyShape(
        kind="qwen3_moe",
        seed=5,
        num_layers=3,
        num_experts=12,
        top_k=4,
        norm_topk_prob=False,
        dense_layers=(0, 2),
        tie_embeddings=False,
    ),
}


VARIANT_SHAPES = {
    "llama_bias": TinyShape(seed=6, bias=True),
    "llama_linear": TinyShape(seed=7, rope="linear"),
    "llama_yarn": TinyShape(seed=8, rope="yarn", tie_embeddings=False),
    "mistral": TinyShape(kind="mistral", seed=9, tie_embeddings=False),
    "mistral_window": TinyShape(kind="mistral", seed=10, sliding_window=50, tie_embeddings=False),
    "qwen2": TinyShape(kind="qwen2", seed=11),
    "qwen2_untied": TinyShape(kind="qwen2", seed=12, num_heads=4, tie_embeddings=False),
    "qwen2_window": TinyShape(kind="qwen2", seed=23, num_layers=3, sliding_window=37),
    "qwen2_yarn": TinyShape(kind="qwen2", seed=14, rope="yarn"),
    "qwen3_window_bias": TinyShape(kind="qwen3", seed=15, sliding_window=64, bias=True),
    "qwen3_moe_window": TinyShape(
        kind="qwen3_moe", seed=16, sliding_window=33, tie_embeddings=False
    ),
}


def shapes_golden(shapes: dict[str, TinyShape]) -> dict:
    """Logits of some positions of one prompt, and greedy tokens of several, per tiny model."""
    models = {}
    for name, shape in shapes.items():
        with tempfile.TemporaryDirectory() as folder:
            write_tiny_model(Path(folder), shape)
            models[name] = {"shape": asdict(shape), **folder_golden(name, folder)}
    return {**versions(), "min_margin": MIN_MARGIN, "models": models}


def published_golden() -> dict:
    """The same of each tiny model of `tests.doubles.tiny_published`."""
    models = {}
    for name, make in PUBLISHED.items():
        with tempfile.TemporaryDirectory() as folder:
            write_published(Path(folder), make())
            models[name] = folder_golden(name, folder)
    return {**versions(), "min_margin": MIN_MARGIN, "models": models}


def folder_golden(name: str, folder: str) -> dict:
    """Logits and greedy tokens of the model in a folder."""
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    wrong = {key: loaded[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(wrong.values()):
        raise SystemExit(f"{name}: weights do not fit: {wrong}")
    model.eval().set_attn_implementation("eager")
    prompt = [(5 * index + index * index) % 256 for index in range(200)]
    kept = [0, 1, 63, 64, 127, 199]
    logits = model(torch.tensor([prompt])).logits[0]
    items = []
    for length in (1, 7, 40, 100, 200):
        output, margin = greedy(model, prompt[-length:], ())
        if output:
            items.append({"prompt_ids": prompt[-length:], "output_ids": output})
        print(name, length, len(output), f"{margin:.3f}", len(set(output)), flush=True)
    return {
        "prompt_ids": prompt,
        "positions": kept,
        "logits": [[round(v, 5) for v in logits[p].tolist()] for p in kept],
        "items": items,
    }


DEEPSEEK_SHAPES = {
    "v3": DeepseekShape(seed=1),
    "v3_plain_queries": DeepseekShape(
        seed=2, q_rank=None, yarn=False, groups=1, top_groups=1, top_k=2, num_shared=2,
        first_dense=0, num_layers=2, norm_topk_prob=False, draft_layers=1,
    ),
    "v32": DeepseekShape(kind="deepseek_v32", seed=3),
}  # fmt: skip
DEEPSEEK_KEPT = (0, 1, 63, 127, 128, 149)
"""Positions whose logits are kept: the first, those around a tile's end, the last."""


def deepseek_golden() -> dict:
    """Logits of some positions of one prompt, and greedy tokens of several, per tiny model."""
    models = {}
    for name, shape in DEEPSEEK_SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_tiny_deepseek(Path(folder), shape)
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.set_attn_implementation("eager")
        prompt = [(5 * index + index * index) % 256 for index in range(150)]
        logits = model(torch.tensor([prompt])).logits[0]
        items = []
        for length in (1, 7, 40, 150):
            output, margin = greedy(model, prompt[-length:], (), CLOSE_MARGIN)
            items.append({"prompt_ids": prompt[-length:], "output_ids": output})
            print(name, length, len(output), f"{margin:.4f}", len(set(output)), flush=True)
        models[name] = {
            "shape": asdict(shape),
            "prompt_ids": prompt,
            "positions": DEEPSEEK_KEPT,
            "logits": [[round(v, 6) for v in logits[p].tolist()] for p in DEEPSEEK_KEPT],
            "items": items,
        }
    return {**versions(), "min_margin": CLOSE_MARGIN, "models": models}


def versions() -> dict:
    """What made the data."""
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "dtype": "float32",
    }


def _write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", "utf-8")
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
