"""Our default model as peers want it: a Hugging Face folder with float32 weights."""

import json
from pathlib import Path

from safetensors.torch import save_file

from services.engine.compute.loader import load_model


def export_folder(folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer; kept if it is already there."""
    if (folder / "model.safetensors").exists():
        return
    source = load_model("")
    folder.mkdir(parents=True, exist_ok=True)
    own = source.config
    eos = list(source.eos_token_ids)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": own.vocab_size,
        "hidden_size": own.hidden_size,
        "intermediate_size": own.intermediate_size,
        "num_hidden_layers": own.num_layers,
        "num_attention_heads": own.num_heads,
        "num_key_value_heads": own.num_kv_heads,
        "head_dim": own.head_dim,
        "max_position_embeddings": own.max_position,
        "rms_norm_eps": own.rms_norm_eps,
        "rope_theta": own.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": own.tie_embeddings,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
    }
    _write(folder / "config.json", config)
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": source.text.chat_template}
        | dict(source.text.special_tokens),
    )
    (folder / "tokenizer.json").write_bytes(source.text.tokenizer_json)
    # A weight that shares its memory with another cannot be saved; a copy can.
    tensors = {name: tensor.clone() for name, tensor in source.weights.items()}
    partial = folder / "model.partial"
    save_file(tensors, partial, {"format": "pt"})
    partial.rename(folder / "model.safetensors")


def _write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
