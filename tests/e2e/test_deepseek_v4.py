"""DeepSeek V4 in a fleet: a tool call in DSML, experts that move, an engine killed, a prefix found.

The model is tiny and random, but for one answer that it has learned: a tool call.
"""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from services.common.text import Tokenizer, chat_ids, template_of
from services.engine.model_files import load_text_assets
from services.engine.tiny_models import write_tiny_model
from services.gateway.openai.chat_request import parse_chat
from tests.doubles.learned_answer import learn_answer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BLOCK = 16
PROMPT = [(37 * i * i + 11 * i) % 500 for i in range(150)]
TOKENS = 160
SIZES = {"hidden_size": 128, "num_hidden_layers": 3}
"""Each kind of layer once; the first has a table of experts."""
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT: dict[str, Any] = {
    "model": "v4",
    "messages": [{"role": "user", "content": "How warm is it in Paris?"}],
    "tools": [
        {
            "type": "function",
            "function": {"name": "warmth", "description": "In a city.", "parameters": PARAMETERS},
        }
    ],
    "temperature": 0,
    "max_tokens": 120,
    "reasoning_effort": "none",
}
CALL = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="warmth">\n'
    '<｜DSML｜parameter name="city" string="true">Paris'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>"
)


def _command(*arguments: str) -> str:
    command = [sys.executable, "-m", "inferfleet_cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a fleet of two engines that serve the model as `v4`."""
    root = tmp_path_factory.mktemp("v4")
    model = write_tiny_model(root / "model", "deepseek_v4", changes=SIZES)
    assets = load_text_assets(str(model))
    (request,) = parse_chat(CHAT).requests
    prompt = chat_ids(template_of(assets), request.chat)
    assert prompt is not None
    learn_answer(model, prompt, Tokenizer(assets).encode(CALL))
    where = f"--state-dir={root / 'state'}"
    engine = ("served_name=v4", "deterministic=yes", "threads=1", "num_blocks=256")
    engine += (f"block_size={BLOCK}", "redundant_experts=2")
    balancer = ("match_timeout_s=5", "stall_limit_s=120")
    _command(
        *("up", "--detach", f"--end-with={os.getpid()}", "--engines=2", "--port=0"),
        *("--http-port=0", f"--model={model}", where),
        *(f"--set=engine.{key}" for key in engine),
        *(f"--set=balancer.{key}" for key in balancer),
    )
    yield root / "state"
    _command("down", where)


def _metric(address: str, name: str) -> float:
    """Its value at a process, 0 before it is counted."""
    with urllib.request.urlopen(f"http://{address}/metrics") as reply:
        found = re.search(rf"^{re.escape(name)} (\S+)$", reply.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.fixture
def fleet(state_dir: Path, fleet_at):
    return fleet_at(state_dir)


@pytest.fixture
def addresses(fleet) -> dict[str, str]:
    """Where each process reports its metrics."""
    return {one["name"]: one["metrics_address"] for one in fleet.status()["services"]}


@pytest.fixture
def wait_indexed(addresses: dict[str, str], wait_until):
    """Waits until the index has the snapshots of both engines, as their metrics count them."""

    def is_complete() -> bool:
        name = 'inferfleet_engine_cache_stored_total{kind="state"}'
        stored = sum(_metric(addresses[f"engine-{number}"], name) for number in (1, 2))
        indexed = _metric(addresses["kvcache"], "inferfleet_kvcache_states_stored_total")
        return 0 < stored <= indexed  # a resynchronised index has counted some of them again

    return lambda: wait_until(is_complete, "the snapshots in the index")


def test_a_tool_call_is_made_and_its_result_read(fleet, wait_indexed) -> None:
    usage = {"include_usage": True}
    with openai.OpenAI(base_url=f"{fleet.http_url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**CHAT)
        (call,) = whole.choices[0].message.tool_calls
        assert call.function.name == "warmth"
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        assert whole.choices[0].finish_reason == "tool_calls"
        assert not whole.choices[0].message.content
        wait_indexed()
        with client.chat.completions.stream(**CHAT, stream_options=usage) as stream:
            final = stream.get_final_completion()
        (again,) = final.choices[0].message.tool_calls
        assert again.function.arguments == call.function.arguments
        cached = final.usage.prompt_tokens_details.cached_tokens
        assert cached == (whole.usage.prompt_tokens - 1) // BLOCK * BLOCK
        result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
        messages = [*CHAT["messages"], whole.choices[0].message, result]
        after = client.chat.completions.create(**{**CHAT, "messages": messages, "max_tokens": 8})
    assert after.usage.prompt_tokens > whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_a_stream_outlives_its_engine_and_its_prefix_is_found(
    state_dir: Path, fleet, addresses, wait_indexed, wait_until, tmp_path: Path
) -> None:
    def begin(token_ids: list[int], max_tokens: int):
        request = fleet.request(token_ids, max_tokens=max_tokens, ignore_eos=True)
        request.model = "v4"
        return fleet.stream(request)

    want = begin(PROMPT, TOKENS).result()
    holder = want.summary.engine_id
    assert want.summary.usage.cached_tokens == 0
    wait_indexed()
    near = begin([*PROMPT, 1, 2, 3], 4).result()
    assert near.summary.engine_id == holder
    assert near.summary.usage.cached_tokens == len(PROMPT) // BLOCK * BLOCK

    rows = [[7, 6, 5, 4, 3, 2, 1, 0, expert, 7 - expert] for expert in range(3)]
    (tmp_path / "map.json").write_text(json.dumps({"phy2log": rows}))
    where = f"--state-dir={state_dir}"
    assert "version 1 written" in _command("placement", "set", str(tmp_path / "map.json"), where)

    def versions() -> list[int]:
        return [engine["placement_version"] for engine in fleet.engines().values()]

    wait_until(lambda: versions() == [1, 1], "the version in `status`")
    pid = fleet.pid(holder)
    stream = begin(PROMPT, TOKENS)
    wait_until(lambda: stream.deltas() >= 3, "the stream to run")
    assert stream.events[0].started.engine_id == holder
    os.kill(pid, signal.SIGKILL)
    resumed = stream.result()
    assert resumed.summary.engine_id != holder
    assert resumed.token_ids == want.token_ids

    # The engine that is left has computed all but the last token, and the index knows it even if
    # the other engine is back.
    left = addresses[resumed.summary.engine_id]
    unacknowledged = "inferfleet_engine_kv_event_batches_unacknowledged"
    wait_until(lambda: _metric(left, unacknowledged) == 0, "its events in the index")
    known = [*PROMPT, *want.token_ids]
    found = begin([*known, 1, 2, 3], 4).result()
    assert found.summary.engine_id == resumed.summary.engine_id
    assert found.summary.usage.cached_tokens == (len(known) - 1) // BLOCK * BLOCK
