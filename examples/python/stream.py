"""Stream one prompt from a fleet: python examples/python/stream.py "Once upon a time"

Needs only the published package (grpcio and protobuf) and a gateway, e.g. from `inferfleet up`.
"""

import argparse
import sys

from inferfleet import Client, Delta, InferfleetError, Started, Summary


def main() -> int:
    parser = argparse.ArgumentParser(description="Stream one prompt and say what it cost.")
    parser.add_argument("prompt", nargs="?", default="What is the capital of France?")
    parser.add_argument("--address", default="127.0.0.1:50051", help="host:port of the gateway")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--raw", action="store_true", help="continue the text instead of chatting")
    args = parser.parse_args()
    messages = None if args.raw else [{"role": "user", "content": args.prompt}]
    try:
        with Client(args.address) as client:
            stream = client.generate(
                args.prompt if args.raw else None,
                messages=messages,
                max_tokens=args.max_tokens,
                temperature=0,
            )
            for event in stream:
                if isinstance(event, Started):
                    print(f"[{event.model} on {event.engine_id}]", file=sys.stderr)
                elif isinstance(event, Delta):
                    print(event.text, end="", flush=True)
                elif isinstance(event, Summary):
                    usage = event.usage
                    print(
                        f"\n[{usage.prompt_tokens} tokens in ({usage.cached_tokens} cached), "
                        f"{usage.completion_tokens} out; trace {stream.ids.trace_id}]",
                        file=sys.stderr,
                    )
    except (InferfleetError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
