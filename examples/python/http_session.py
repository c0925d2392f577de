"""gzip, a schema, a tool and CORS over plain HTTP: python examples/python/http_session.py

Needs nothing but Python and a gateway's HTTP address, e.g. from `inferfleet up`. The last step
needs `inferfleet up --set gateway.cors_origins=https://chat.example.com`.
"""

import argparse
import gzip
import json
import sys
import urllib.error
import urllib.request
from typing import Any

PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "London"]}},
    "required": ["city"],
    "additionalProperties": False,
}
ROOM = {
    "type": "object",
    "properties": {"room": {"enum": ["kitchen", "cellar"]}},
    "required": ["room"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "read_temperature", "parameters": ROOM}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}


class Session:
    """Calls one gateway; every body is compressed."""

    def __init__(self, base: str) -> None:
        self._base = base
        with urllib.request.urlopen(f"{base}/v1/models") as answer:
            self._model = json.load(answer)["data"][0]["id"]

    def ask(self, question: str, **fields: Any) -> dict[str, Any]:
        """The message that answers a question."""
        messages = [{"role": "user", "content": question}]
        body = {"model": self._model, "messages": messages, "temperature": 0, "max_tokens": 128}
        request = urllib.request.Request(
            f"{self._base}/v1/chat/completions",
            data=gzip.compress(json.dumps({**body, **fields}).encode()),
            headers={"Content-Type": "application/json", "Content-Encoding": "gzip"},
        )
        with urllib.request.urlopen(request) as answer:
            message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
        return message

    def allowed_origin(self, origin: str) -> str | None:
        """What a browser asks before a page of `origin` may call."""
        request = urllib.request.Request(
            f"{self._base}/v1/chat/completions",
            method="OPTIONS",
            headers={
                "Origin": origin,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "content-type",
            },
        )
        with urllib.request.urlopen(request) as answer:
            allowed: str | None = answer.headers["Access-Control-Allow-Origin"]
        return allowed


def main() -> int:
    parser = argparse.ArgumentParser(description="Call the OpenAI-compatible face over HTTP.")
    parser.add_argument("--base", default="http://127.0.0.1:8080")
    parser.add_argument("--origin", default="https://chat.example.com")
    args = parser.parse_args()
    try:
        session = Session(args.base)
        print("gzip:", session.ask("What is the capital of France?")["content"])
        place = session.ask("Where is the Eiffel Tower?", response_format=FORMAT)
        print("schema:", json.loads(place["content"])["city"])
        choice = {"tool_choice": "required", "parallel_tool_calls": False}
        message = session.ask("How warm is it in the kitchen?", tools=[TOOL], **choice)
        for call in message["tool_calls"]:
            print("tool:", call["function"]["name"], json.loads(call["function"]["arguments"]))
        print("cors:", session.allowed_origin(args.origin))
    except urllib.error.HTTPError as error:
        print(f"{error}: {error.read().decode()}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
