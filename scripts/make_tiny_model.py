"""Write a tiny random model in the published Hugging Face layout, to try the engine on.

    python scripts/make_tiny_model.py /tmp/tiny-moe --kind qwen3_moe
    inferfleet up --model /tmp/tiny-moe

The same arguments write the same bytes on every machine. The weights are random.
"""

import argparse
from pathlib import Path

from tests.doubles.tiny_gguf import check_packing, write_gguf
from tests.doubles.tiny_model import KINDS, TinyShape, write_tiny_model


def main() -> None:
    """Write the folder and say what is in it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="made if it does not exist")
    parser.add_argument("--kind", choices=KINDS, default="llama", help="architecture")
    for name, text in _NUMBERS.items():
        default = getattr(TinyShape(), name)
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=default, help=f"{text} (default {default})")
    parser.add_argument("--gguf", metavar="KIND", help="as one GGUF file too: F32, F16, Q8_0 ...")
    args = vars(parser.parse_args())
    folder, kind = args.pop("folder"), args.pop("gguf")
    shape = TinyShape(**args)
    try:
        if kind:
            check_packing(shape, kind)
        write_tiny_model(folder, shape)
        if kind:
            write_gguf(folder, folder / f"{folder.name}.{kind}.gguf", kind)
    except ValueError as error:
        parser.error(str(error))
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size:>10}  {path}")


_NUMBERS = {
    "seed": "of the random weights",
    "num_layers": "layers",
    "hidden_size": "width of a row",
    "num_heads": "query heads",
    "num_kv_heads": "key and value heads",
    "intermediate_size": "width of a dense feed-forward",
    "max_position": "longest sequence",
    "num_experts": "experts of a layer, qwen3_moe only",
    "top_k": "experts that each row is sent to, qwen3_moe only",
    "expert_size": "width of one expert, qwen3_moe only",
}

if __name__ == "__main__":
    main()
