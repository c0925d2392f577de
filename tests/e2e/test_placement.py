"""Experts placed in a whole fleet, as an operator does it: plan, set, status, trace, roll back."""

import json
import os

import pytest

from tests.doubles.tiny_model import TinyShape, write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_every_engine_follows_a_map_that_an_operator_sets(tmp_path, inferfleet, wait_until):
    shape = TinyShape(kind="qwen3_moe", seed=4, tie_embeddings=False)
    model = write_tiny_model(tmp_path / "tiny-moe", shape)
    keys = ("served_name=moe", "redundant_experts=2", "num_blocks=128")
    inferfleet(
        *(
            "up",
            "--detach",
            f"--end-with={os.getpid()}",
            "--port=0",
            "--http-port=0",
            f"--model={model}",
        ),
        *(f"--set=engine.{key}" for key in keys),
    )
    try:
        generate = ("generate", "count", "--model=moe", "--max-tokens=20", "--seed=7", "--json")
        before = json.loads(inferfleet(*generate))
        plan = tmp_path / "map.json"
        rows = [[7, 6, 5, 4, 3, 2, 1, 0, 0, 1], [1, 0, 3, 2, 5, 4, 7, 6, 5, 4]]
        plan.write_text(json.dumps({"phy2log": rows}))
        written = inferfleet("placement", "set", str(plan))
        assert "version 1 written" in written
        assert [line.split()[:2] for line in written.splitlines()[-2:]] == [
            ["engine-1", "1"],
            ["engine-2", "1"],
        ]

        def versions() -> list[int]:
            status = json.loads(inferfleet("status", "--json"))
            return [engine["placement_version"] for engine in status["engines"]]

        wait_until(lambda: versions() == [1, 1], "the version in `status`")
        after = json.loads(inferfleet(*generate))
        assert after["token_ids"] == before["token_ids"]

        def run_spans() -> list[dict]:
            spans = _spans(inferfleet, after["request_id"])
            return [span for span in spans if span["name"] == "run"]

        (run,) = wait_until(run_spans, "the trace")
        assert run["attributes"]["inferfleet.placement_version"] == 1
        loads = tmp_path / "loads.json"
        loads.write_text(json.dumps([[900, 1, 1, 1, 1, 1, 1, 1]] * 2))
        assert "tomorrow" in inferfleet("placement", "plan", f"--loads={loads}")
        inferfleet("placement", "set", str(plan))
        assert "version 3 written" in inferfleet("placement", "rollback", "1")
        assert "rollback to 1" in inferfleet("placement", "history")
        wait_until(lambda: versions() == [3, 3], "the version in `status`")
    finally:
        inferfleet("down")


def _spans(inferfleet, request_id) -> list[dict]:
    try:
        return list(json.loads(inferfleet("trace", request_id, "--json"))["spans"])
    except AssertionError:
        return []  # a trace arrives a moment after its request
