"""The official openai package against a fleet: python examples/python/openai_client.py

Needs `pip install openai` and a gateway's HTTP address, e.g. from `inferfleet up`.
"""

import argparse
import sys

import openai


def main() -> int:
    parser = argparse.ArgumentParser(description="Chat through the OpenAI-compatible face.")
    parser.add_argument("prompt", nargs="?", default="What is the capital of France?")
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.base_url, api_key="not needed")
    try:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": args.prompt}],
            max_completion_tokens=args.max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage:
                print(f"\n[{chunk.usage.total_tokens} tokens]", file=sys.stderr)
    except (openai.APIError, IndexError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
