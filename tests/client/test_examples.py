"""The examples, run as their headers say."""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.doubles.gateway import running_gateway
from tests.doubles.scripts import say_hello

EXAMPLES = Path(__file__).parents[2] / "examples"


async def run(*command, cwd=None) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(50):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("raw", [[], ["--raw"]])
async def test_stream(gateway, engine, raw):
    script = EXAMPLES / "python" / "stream.py"
    code, out, err = await run(sys.executable, script, "hi", "--address", gateway.address, *raw)
    assert code == 0, err
    assert engine.reply in out
    assert "tiny on engine-1" in err
    prompt = engine.tokenizer.decode(engine.requests[0].request.token_ids.ids)
    assert (prompt == "hi") is bool(raw)


async def test_stream_says_what_is_wrong():
    script = EXAMPLES / "python" / "stream.py"
    code, _, err = await run(sys.executable, script, "hi", "--address", "127.0.0.1:1")
    assert code == 1
    assert err.startswith("UnavailableError")


async def test_openai_client(gateway, engine):
    script = EXAMPLES / "python" / "openai_client.py"
    base = f"http://{gateway.http}/v1"
    code, out, err = await run(sys.executable, script, "hi", "--base-url", base)
    assert code == 0, err
    assert engine.reply in out
    assert "tokens]" in err


async def test_tools(roomy_gateway, engine):
    called = '{"name": "read_temperature", "arguments": {"room": "cellar"}}'

    async def call_then_answer(request, double):
        demanded = request.request.HasField("constraint")
        double.reply = f"<tool_call>{called}</tool_call>" if demanded else "Cool."
        async for event in say_hello(request, double):
            yield event

    engine.script = call_then_answer
    script = EXAMPLES / "python" / "tools.py"
    base = f"http://{roomy_gateway.http}/v1"
    code, out, err = await run(sys.executable, script, "--base-url", base)
    assert code == 0, err
    assert out.splitlines() == ['read_temperature({"room": "cellar"})', "Cool."]
    prompt = engine.tokenizer.decode(engine.requests[1].request.token_ids.ids)
    assert "<tool_response>\n14.0 °C\n</tool_response>" in prompt


PAGE = "https://chat.example.com"


@pytest.fixture
async def open_gateway(engine):
    """Open to web pages of PAGE; the engine answers what the request's constraint allows."""

    async def answer(request, double):
        kind = request.request.constraint.WhichOneof("kind")
        called = '{"name": "read_temperature", "arguments": {"room": "cellar"}}'
        replies = {
            None: "Paris.",
            "json_schema": '{"city": "London"}',
            "structural_tag": f"<tool_call>{called}</tool_call>",
        }
        double.reply = replies[kind]
        async for event in say_hello(request, double):
            yield event

    engine.script = answer
    engine.max_model_len = 4096
    async with running_gateway(engine, cors_origins=(PAGE,)) as running:
        yield running


async def test_http_session(open_gateway):
    script = EXAMPLES / "python" / "http_session.py"
    base = f"http://{open_gateway.http}"
    code, out, err = await run(sys.executable, script, "--base", base)
    assert code == 0, err
    assert out.splitlines() == [
        "gzip: Paris.",
        "schema: London",
        "tool: read_temperature {'room': 'cellar'}",
        f"cors: {PAGE}",
    ]
    other = ("--base", base, "--origin", "https://other.example")
    code, _, err = await run(sys.executable, script, *other)
    assert code == 1
    assert "cors_origins" in err


@pytest.mark.tools
async def test_http_session_of_node(open_gateway):
    node = shutil.which("node")
    assert node, "node is missing: install Node 18 or later"
    script = EXAMPLES / "node" / "http_session.mjs"
    base = f"http://{open_gateway.http}"
    code, out, err = await run(node, script, base)
    assert code == 0, err
    assert out.splitlines() == [
        "gzip: Paris.",
        "schema: London",
        "tool: read_temperature cellar",
        f"cors: {PAGE}",
    ]
    code, _, err = await run(node, script, base, "https://other.example")
    assert code == 1
    assert "cors_origins" in err


@pytest.mark.tools
async def test_http_session_of_curl(open_gateway):
    for tool in ("curl", "gzip", "sh"):
        assert shutil.which(tool), f"{tool} is missing: install it"
    script = EXAMPLES / "curl" / "session.sh"
    code, out, err = await run("sh", script, f"http://{open_gateway.http}")
    assert code == 0, out + err
    steps = dict(line.split(": ", 1) for line in out.splitlines())
    message = {name: json.loads(steps[name])["choices"][0]["message"] for name in list(steps)[:3]}
    assert message["gzip"]["content"] == "Paris."
    assert json.loads(message["schema"]["content"]) == {"city": "London"}
    (call,) = message["tool"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"room": "cellar"}
    assert steps["cors"] == PAGE


@pytest.mark.tools
async def test_node(gateway, engine, tmp_path):
    """A copy beside the protos, so that no node_modules is left in the tree."""
    node, npm = shutil.which("node"), shutil.which("npm")
    assert node, "node is missing: install Node 18 or later"
    assert npm, "npm is missing: install it with Node"
    folder = tmp_path / "examples" / "node"
    shutil.copytree(EXAMPLES / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(EXAMPLES.parent / "protos", tmp_path / "protos")
    code, out, err = await run(npm, "install", "--no-audit", "--no-fund", cwd=folder)
    assert code == 0, out + err
    flags = ("--address", gateway.address)
    code, out, err = await run(node, "stream.mjs", "hi", *flags, cwd=folder)
    assert code == 0, err
    assert engine.reply in out
    assert "[EOS]" in err
    code, _, err = await run(node, "stream.mjs", "hi", "--model", "gpt", *flags, cwd=folder)
    assert code == 1
    assert err.startswith("NOT_FOUND")


@pytest.mark.tools
async def test_cpp(gateway, engine, tmp_path):
    """Built in a copy beside the protos, so that no build folder is left in the tree."""
    for tool in ("make", "g++", "pkg-config", "protoc", "grpc_cpp_plugin"):
        assert shutil.which(tool), f"{tool} is missing: see examples/cpp/Makefile"
    folder = tmp_path / "examples" / "cpp"
    shutil.copytree(EXAMPLES / "cpp", folder, ignore=shutil.ignore_patterns("build"))
    shutil.copytree(EXAMPLES.parent / "protos", tmp_path / "protos")
    code, out, err = await run("make", cwd=folder)
    assert code == 0, out + err
    code, out, err = await run(folder / "build" / "stream", gateway.address, "hi")
    assert code == 0, err
    assert engine.reply in out
    assert "tokens from engine-1]" in out
    code, _, err = await run(folder / "build" / "stream", "127.0.0.1:1", "hi")
    assert code == 1
    assert err.startswith("no model at 127.0.0.1:1")
