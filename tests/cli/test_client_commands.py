"""generate, chat and their errors against a stand-in gateway; what the published wheel can do."""

import io
import json
import subprocess
import sys

import pytest

from inferfleet_cli.main import main
from inferfleet_cli.status import status_text


def test_generate_json_prints_one_object_with_every_promised_key(gateway, capsys, tmp_path):
    servicer, address = gateway
    assert main(["generate", "Hello", "--json", "--address", address, "--max-tokens", "3"]) == 0
    answer = json.loads(capsys.readouterr().out)
    total = answer["timings_s"].pop("total")
    assert 0 < answer["timings_s"].pop("ttft") <= total
    trace_id = answer.pop("trace_id")
    assert servicer.metadata[0]["traceparent"].split("-")[1] == trace_id
    assert answer == {
        "request_id": "r-1",
        "model": "tiny",
        "text": "Paris.",
        "token_ids": [0, 1, 2],
        "finish_reason": "EOS",
        "usage": {"prompt_tokens": 9, "cached_tokens": 4, "completion_tokens": 3},
        "engine_id": "engine-2",
        "timings_s": {"queued": 0.25, "prefill": 0.5, "decode": 1.5},
    }


def test_flags_reach_the_request_and_absent_ones_stay_absent(gateway, capsys):
    servicer, address = gateway
    flags = ["--temperature", "0", "--seed", "7", "--stop", "a", "--stop", "b"]
    assert main(["generate", "Hi", "--chat", *flags, "--address", address]) == 0
    request = servicer.requests[0]
    assert request.model == "tiny"
    assert [(m.role, m.content) for m in request.chat.messages] == [("user", "Hi")]
    assert request.sampling.HasField("temperature")
    assert request.sampling.temperature == 0
    assert request.sampling.seed == 7
    assert not request.sampling.HasField("top_p")
    assert not request.stop.HasField("max_tokens")
    assert list(request.stop.stop_strings) == ["a", "b"]
    out, err = capsys.readouterr()
    assert out == "Paris.\n"
    assert "9 prompt tokens (4 cached), 3 generated" in err
    assert "inferfleet trace r-1" in err


def test_token_ids_and_standard_input(gateway, monkeypatch, capsys):
    servicer, address = gateway
    assert main(["generate", "--token-ids", "1,2,3", "--address", address]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert main(["generate", "-", "--address", address]) == 0
    assert list(servicer.requests[0].token_ids.ids) == [1, 2, 3]
    assert servicer.requests[1].text == "from a pipe"


def test_a_constraint_comes_from_a_file_or_from_the_flag(gateway, tmp_path):
    servicer, address = gateway
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "null"}')
    for flags in (["--json-schema", str(schema)], ["--json-schema", "{}"], ["--regex", "a+"]):
        assert main(["generate", "x", *flags, "--address", address]) == 0
    constraints = [request.constraint for request in servicer.requests]
    assert [one.json_schema for one in constraints] == ['{"type": "null"}', "{}", ""]
    assert constraints[2].regex == "a+"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["generate", "x", "--json-schema", "none.json"], 2, "--json-schema: neither JSON text"),
        (["generate"], 2, "give either PROMPT or --token-ids"),
        (["generate", "x", "--token-ids", "1"], 2, "give either PROMPT or --token-ids"),
        (["generate", "--token-ids", "1,-2"], 2, "--token-ids: expected numbers"),
        (["generate", "x", "--seed", "-1"], 2, "--seed: -1 is out of range"),
        (["generate", "x", "--model", "huge"], 1, "NOT_FOUND: model: 'huge' is not served"),
    ],
)
def test_a_bad_request_is_one_line_that_names_what_is_wrong(
    gateway, capsys, arguments, status, words
):
    assert main([*arguments, "--address", gateway[1]]) == status
    err = capsys.readouterr().err
    assert err.startswith("inferfleet: ")
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_stream_that_breaks_ends_its_line_before_the_error(gateway, capsys):
    assert main(["generate", "break", "--address", gateway[1]]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("Paris.\n", "inferfleet: DATA_LOSS: the engine is gone\n")


def test_the_api_key_is_sent_and_a_missing_file_is_an_error(gateway, capsys, tmp_path):
    servicer, address = gateway
    key = tmp_path / "key"
    key.write_text("abc\n")
    assert main(["generate", "x", "--address", address, "--api-key-file", str(key)]) == 0
    assert servicer.metadata[0]["authorization"] == "Bearer abc"
    key.unlink()
    assert main(["generate", "x", "--address", address, "--api-key-file", str(key)]) == 2
    assert "--api-key-file: cannot read" in capsys.readouterr().err


def test_two_models_ask_for_a_choice(gateway, capsys):
    servicer, address = gateway
    servicer.models = ["tiny", "small"]
    assert main(["generate", "x", "--address", address]) == 1
    assert "name a model with --model" in capsys.readouterr().err


def test_no_gateway_says_how_to_start_one(capsys, tmp_path):
    assert main(["generate", "x", "--address", "127.0.0.1:9", "--state-dir", str(tmp_path)]) == 1
    assert "start a fleet with `inferfleet up`" in capsys.readouterr().err


def test_chat_keeps_the_history_and_new_forgets_it(gateway, monkeypatch, capsys):
    servicer, address = gateway
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n/new\nthree\n/quit\nfour\n"))
    assert main(["chat", "--address", address, "--system", "Be brief."]) == 0
    turns = [[message.content for message in r.chat.messages] for r in servicer.requests]
    assert turns == [
        ["Be brief.", "one"],
        ["Be brief.", "one", "Paris.", "two"],
        ["Be brief.", "three"],
    ]
    assert capsys.readouterr().out.splitlines()[1:] == ["Paris."] * 3  # a pipe sees no prompt


def test_without_a_fleet_status_says_so(tmp_path, capsys):
    assert main(["status", "--state-dir", str(tmp_path)]) == 3
    assert main(["status", "--json", "--state-dir", str(tmp_path)]) == 3
    assert '"running": false' in capsys.readouterr().out
    assert main(["down", "--state-dir", str(tmp_path)]) == 0
    assert main(["trace", "r-1", "--state-dir", str(tmp_path)]) == 1
    assert "inferfleet up" in capsys.readouterr().err


def test_status_shows_a_balancer_that_does_not_answer():
    shown = status_text(
        {
            "gateway": {"grpc": "127.0.0.1:1", "http": "http://127.0.0.1:2"},
            "uptime_s": 3.2,
            "state_dir": "/s",
            "services": [],
            "engines": [],
            "engines_error": "UNAVAILABLE: away",
        }
    )
    assert shown.splitlines()[0].startswith("gRPC 127.0.0.1:1   HTTP http://127.0.0.1:2   up 3 s")
    assert shown.endswith("the balancer does not answer: UNAVAILABLE: away")


def test_client_commands_load_nothing_that_the_published_wheel_lacks():
    code = (
        "import sys; import inferfleet_cli.main as m; m._parser()\n"
        "lacks = ('services', 'kernels', 'opentelemetry', 'torch', 'etcd3', 'redis')\n"
        "print([name for name in sys.modules if name.split('.')[0] in lacks])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("arguments", [["--engines", "0"], ["--port", "70000"], ["--set", "x"]])
def test_bad_options_of_up_are_refused_by_name(arguments, capsys, tmp_path):
    with pytest.raises(SystemExit) if arguments[0] == "--set" else _nothing():
        assert main(["up", *arguments, "--state-dir", str(tmp_path)]) == 2
    assert arguments[0] in capsys.readouterr().err


class _nothing:
    def __enter__(self):
        return None

    def __exit__(self, *_):
        return None
