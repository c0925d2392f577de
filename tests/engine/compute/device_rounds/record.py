"""The sequence of launches of one decode round, as rehearsed; committed, so that a change is seen.

    python -m tests.engine.compute.device_rounds.record

writes data/decode_round.txt anew: run it after a change that adds, removes or reshapes a launch,
and read the difference. The model has the sizes of Qwen3-8B and two layers.
"""

import tempfile
from pathlib import Path
from typing import Any

from tests.doubles.rehearsal import Rehearsal

FILE = Path(__file__).parent / "data" / "decode_round.txt"
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
SEQUENCES = 4


def rehearse(folder: Path) -> list[str]:
    """Lines of the round: copies, the graph with its launches, and what is launched after it."""
    run = Rehearsal(folder, "qwen3", num_hidden_layers=2, **QWEN3_8B)
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
    """Write the file."""
    with tempfile.TemporaryDirectory() as folder:
        lines = rehearse(Path(folder))
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} lines: {FILE}")


if __name__ == "__main__":
    main()
