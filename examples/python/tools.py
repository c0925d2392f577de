"""A tool, called and answered: python examples/python/tools.py

Needs `pip install openai` and a gateway's HTTP address, e.g. from `inferfleet up`. The call is
demanded (`tool_choice="required"`), which the fleet enforces token by token: a model that was never
taught to call still gives the right name and arguments that fit the schema.
"""

import argparse
import json
import sys

import openai

TEMPERATURES = {"kitchen": 21.5, "cellar": 14.0}
TOOL = {
    "type": "function",
    "function": {
        "name": "read_temperature",
        "description": "The temperature of a room, in degrees Celsius.",
        "parameters": {
            "type": "object",
            "properties": {"room": {"enum": sorted(TEMPERATURES)}},
            "required": ["room"],
        },
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Let a model call a function.")
    parser.add_argument("prompt", nargs="?", default="How warm is it in the kitchen?")
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.base_url, api_key="not needed")
    messages = [{"role": "user", "content": args.prompt}]
    try:
        common = {"model": client.models.list().data[0].id, "tools": [TOOL], "temperature": 0}
        answer = client.chat.completions.create(
            **common,
            messages=messages,
            tool_choice="required",
            parallel_tool_calls=False,
            max_completion_tokens=128,
        )
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            print(f"{call.function.name}({call.function.arguments})")
            room = json.loads(call.function.arguments)["room"]
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": f"{TEMPERATURES[room]} °C"}
            )
        answer = client.chat.completions.create(
            **common, messages=messages, tool_choice="none", max_completion_tokens=48
        )
        print(answer.choices[0].message.content)
    except (openai.APIError, IndexError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
