"""The launches of one decode round, as rehearsed; committed, so that a change is seen.

    python -m tests.engine.compute.device_rounds.record

writes data/*.txt anew: run it after a change that adds, removes or reshapes a launch, and read the
difference. The models have the sizes of Qwen3-8B and Qwen3-30B-A3B, and two layers.
"""

import tempfile
from pathlib import Path
from typing import Any

from tests.doubles.rehearsal import Rehearsal

FOLDER = Path(__file__).parent / "data"
QWEN3_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
"""config.json of Qwen/Qwen3-8B, without the number of layers."""
QWEN3_30B_A3B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
"""config.json of Qwen/Qwen3-30B-A3B, without the number of layers."""
ROUNDS: dict[str, tuple[str, dict[str, Any]]] = {
    "decode_round": ("qwen3", QWEN3_8B),
    "decode_round_experts": ("qwen3_moe", QWEN3_30B_A3B),
}
"""Architecture and sizes of the model, by name of the file."""
SEQUENCES = 4


def recorded(name: str) -> list[str]:
    """The committed lines of a round."""
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()


def rehearse(name: str, folder: Path) -> list[str]:
    """Lines of a round: copies, the graph with its launches, and what is launched after it."""
    architecture, sizes = ROUNDS[name]
    run = Rehearsal(folder, architecture, num_hidden_layers=2, **sizes)
    prefill = run.round(20)
    run.device.clear()
    run.round(*[1] * SEQUENCES, previous=prefill)
    (graph,) = run.device.replays
    lines = [f"copy up i32[{words}]" for words in run.device.uploads]
    for line in run.device.launches:
        lines.append(line)
        if line == "graph":
            lines += [f"  {inner}" for inner in graph.launches]
    shapes = " ".join(str(list(shape)) for shape in run.device.fetches[-1])
    return [*lines, f"copy down {shapes}"]


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name in ROUNDS:
        with tempfile.TemporaryDirectory() as folder:
            lines = rehearse(name, Path(folder))
        file = FOLDER / f"{name}.txt"
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{len(lines)} lines: {file}")


if __name__ == "__main__":
    main()
