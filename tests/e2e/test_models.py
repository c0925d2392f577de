"""Two real models behind one name on a real fleet: shares, promotion under load, drain."""

import json
import os
import threading
from collections import Counter

import pytest

from inferfleet import Client
from tests.doubles.tiny_model import TinyShape, write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.verify, pytest.mark.timeout(300)]


def test_two_revisions_of_a_model_share_its_requests(tmp_path, inferfleet, wait_until):
    models = [
        write_tiny_model(tmp_path / f"tiny-{seed}", TinyShape(kind="llama", seed=seed))
        for seed in (4, 5)
    ]
    inferfleet(
        *("up", "--detach", f"--end-with={os.getpid()}", "--port=0", "--http-port=0"),
        f"--model={models[0]}",
        f"--set=engine-2.model={models[1]}",
        *(f"--set=engine.{key}" for key in ("served_name=tiny", "num_blocks=256")),
    )
    try:
        status = json.loads(inferfleet("status", "--json"))
        record = json.loads((tmp_path / ".inferfleet" / "fleet.json").read_text())
        old, new = (engine["model_revision"] for engine in status["engines"])
        assert old != new
        inferfleet("models", "set", "chat", f"tiny@{old}=9", f"tiny@{new}=1")
        assert "90.00%" in inferfleet("models", "list")
        with Client(record["gateway"]) as client:
            wait_until(lambda: "chat" in {m.name for m in client.models()}, "the alias")

            def revision_of(number: int, prefix: str) -> str:
                answer = client.complete(
                    token_ids=[1, 2, 3 + number % 50],
                    model="chat",
                    max_tokens=4,
                    ignore_eos=True,
                    request_id=f"{prefix}-{number}",
                )
                assert len(answer.choices[0].token_ids) == 4
                return answer.model_revision

            counts = Counter(revision_of(number, "a") for number in range(100))
            assert counts.keys() == {old, new}
            assert 1 <= counts[new] <= 25, counts
            seen, failures, stop = [], [], threading.Event()

            def load(name: str) -> None:
                number = 0
                while not stop.is_set():
                    try:
                        seen.append(revision_of(number, name))
                    except Exception as error:
                        failures.append(error)
                    number += 1

            workers = [threading.Thread(target=load, args=(f"w{n}",)) for n in range(4)]
            for worker in workers:
                worker.start()
            try:
                wait_until(lambda: len(seen) > 30 or failures, "some answers")
                inferfleet("models", "promote", "chat", f"tiny@{new}")
                drained = inferfleet("models", "drain", f"tiny@{old}", "--grace", "30")
                assert "engine-1:" in drained
                at = len(seen)
                wait_until(lambda: len(seen) > at + 30 or failures, "more answers")
            finally:
                stop.set()
                for worker in workers:
                    worker.join()
            assert failures == []
            assert set(seen[at + 8 :]) == {new}
    finally:
        inferfleet("down")
