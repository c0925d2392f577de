"""Maps of experts set by the command while a real core streams: it follows, and no bit moves."""

import asyncio
import json

import pytest
from google.protobuf import json_format

from inferfleet_cli.main import main
from inferfleet_proto.internal.v1 import engine_pb2
from inferfleet_proto.v1 import inference_pb2
from services.common.config.settings import ConfigError
from services.common.etcd.client import Etcd
from services.common.etcd.registry import ENGINES_PREFIX
from services.engine.contract.core_link import CoreLink
from services.engine.eplb.placement_store import PlacementStore, list_groups
from tests.doubles.etcd_keys import delete_prefix
from tests.doubles.tiny_model import TinyShape, write_tiny_model

pytestmark = pytest.mark.services
EXPERTS = "vocab_size=259,eos=258,forward_ms=2,experts=8,slots=12,ranks=2"
MAPS = (
    [[7, 6, 5, 4, 3, 2, 1, 0, 0, 0], [3, 3, 3, 0, 1, 2, 7, 6, 5, 4]],
    [[0, 1, 2, 3, 4, 5, 6, 7, 4, 5], [1, 0, 3, 2, 5, 4, 7, 6, 5, 4]],
)
PROMPTS = [[(11 * index + 7 * at) % 256 for at in range(5 + 20 * index)] for index in range(3)]


def _request(number, prompt, max_tokens=80):
    request = inference_pb2.GenerateRequest(
        model="moe",
        token_ids=inference_pb2.TokenIds(ids=prompt),
        request_id=f"r-{number}",
        sampling=inference_pb2.SamplingParams(temperature=0.8, seed=7),
        stop=inference_pb2.StopParams(max_tokens=max_tokens, ignore_eos=True),
    )
    return engine_pb2.EngineRequest(request=request)


async def _tokens(front, number, prompt):
    """All token ids of one stream, and the versions in use at its first token and at its end."""
    token_ids, versions = [], []
    async for event in front.engine.Run(_request(number, prompt)):
        token_ids += event.delta.token_ids
        versions.append(front.server.load_state.placement_version)
    return token_ids, (versions[0], versions[-1])


async def _placement(*arguments):
    """The command, in a thread, as another process would run it."""
    return await asyncio.to_thread(main, ["placement", *arguments])


@pytest.fixture(scope="module")
def tiny_moe(tmp_path_factory):
    shape = TinyShape(kind="qwen3_moe", seed=4, tie_embeddings=False)
    return write_tiny_model(tmp_path_factory.mktemp("moe") / "m", shape)


async def _start(start_front, etcd_endpoint, tiny_moe):
    etcd = Etcd([etcd_endpoint])
    await delete_prefix(etcd, "/inferfleet/placement/")  # groups of other tests share this etcd
    await etcd.close()
    return await start_front(
        core=CoreLink(),
        simulate="",
        model=str(tiny_moe),
        served_name="moe",
        threads=1,
        num_blocks=128,
        block_size=16,
        deterministic=True,
        redundant_experts=2,
        expert_parallel=2,
        etcd=(etcd_endpoint,),
    )


async def test_maps_that_are_set_while_streams_run_change_no_token(
    start_front, etcd_endpoint, tiny_moe, tmp_path, capsys
):
    front = await _start(start_front, etcd_endpoint, tiny_moe)
    expected = [(await _tokens(front, f"alone-{i}", p))[0] for i, p in enumerate(PROMPTS)]
    done, runs = asyncio.Event(), []

    async def keep_running(lane):
        turn = 0
        while not done.is_set():
            found, versions = await _tokens(front, f"{lane}-{turn}", PROMPTS[lane])
            assert found == expected[lane]
            runs.append(versions)
            turn += 1

    lanes = [asyncio.create_task(keep_running(lane)) for lane in range(len(PROMPTS))]
    etcd = f"--etcd={etcd_endpoint}"
    for number, rows in enumerate(MAPS, start=1):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps({"phy2log": rows}))
        assert await _placement("set", str(file), etcd, "--group=moe") == 0
        assert front.server.load_state.placement_version == number
    await _counted(etcd_endpoint)  # counts come every few seconds, a plan needs some
    assert await _placement("set", "--plan", etcd, "--group=moe") == 0
    assert await _placement("rollback", "1", etcd, "--group=moe") == 0
    version = front.server.load_state.placement_version
    done.set()
    await asyncio.gather(*lanes)
    assert len(runs) >= len(lanes)
    assert any(first != last for first, last in runs), "no stream ran through a change"
    assert version in (3, 4)  # a plan that gains nothing is not written
    assert f"version {version} written" in capsys.readouterr().out
    await _check_reported_version(front, etcd_endpoint, version)


async def _check_reported_version(front, etcd_endpoint, version):
    """The version in GetInfo, in the load, in the registry, and in the next request's trace."""
    info = await front.engine.GetInfo(engine_pb2.GetInfoRequest())
    assert info.placement_version == version
    load = front.engine.WatchLoad(engine_pb2.WatchLoadRequest())
    assert (await load.read()).placement_version == version
    load.cancel()
    etcd = Etcd([etcd_endpoint])
    async with asyncio.timeout(20):
        while True:
            entry = await etcd.get(f"{ENGINES_PREFIX}engine-under-test")
            found = json_format.Parse(entry.value, engine_pb2.EngineInfo())
            if found.placement_version == version:
                break
    await etcd.close()
    front.spans.clear()
    await _tokens(front, "last", PROMPTS[0])
    spans = await front.spans.by_name(6)
    assert spans["run"].attributes["inferfleet.placement_version"] == version


async def _serve_hot_tokens(front):
    """Prompts of which most tokens are for one expert; each begins anew, so that none is cached."""
    for turn in range(259):
        request = _request(f"hot-{turn}", [turn] + [3] * 1500, max_tokens=100)
        request.request.model = "fake"
        async for _ in front.engine.Run(request):
            pass


async def _counted(etcd_endpoint):
    """Wait until the engine has published a count that is not 0."""
    etcd = Etcd([etcd_endpoint])
    await _group_of(
        etcd, "engine-under-test", lambda state: any(map(any, _load_of(state, "engine-under-test")))
    )
    await etcd.close()


def _load_of(state, engine_id):
    return state.loads[engine_id].load


async def _group_of(etcd, engine_id, holds):
    async with asyncio.timeout(50):
        while True:
            for name, state in (await list_groups(etcd)).items():
                if engine_id in state.applied and engine_id in state.loads and holds(state):
                    return name, state
            await asyncio.sleep(0.05)


async def test_the_controller_of_a_simulated_engine_writes_and_the_engine_follows(
    start_front, etcd_endpoint
):
    front = await start_front(
        core=CoreLink(),
        simulate=EXPERTS,
        etcd=(etcd_endpoint,),
        placement_interval_s=0.2,
    )
    served = asyncio.create_task(_serve_hot_tokens(front))
    etcd = Etcd([etcd_endpoint])
    name, state = await _group_of(
        etcd,
        "engine-under-test",
        lambda state: state.current and state.applied["engine-under-test"].version >= 1,
    )
    assert state.leader == "engine-under-test"
    assert state.current.author == "controller engine-under-test"
    assert state.current.balance_after > state.current.balance_before
    served.cancel()
    await asyncio.wait({served})
    await front.close()
    left = await PlacementStore(etcd, name).read()
    assert (left.leader, dict(left.applied), dict(left.loads)) == ("", {}, {})
    assert left.current == state.current
    await etcd.close()


async def test_a_controller_that_cannot_plan_is_refused_at_the_start(start_front, etcd_endpoint):
    with pytest.raises(ConfigError, match=r"placement_nodes.*do not divide"):
        await start_front(
            core=CoreLink(),
            simulate=EXPERTS,
            etcd=(etcd_endpoint,),
            placement_interval_s=5,
            placement_policy="hierarchical",
            placement_groups=4,
            placement_nodes=3,
        )


async def test_an_engine_without_etcd_or_experts_takes_no_part(start_front, etcd_endpoint, caplog):
    await start_front(core=CoreLink(), simulate=EXPERTS, placement_interval_s=5)
    assert "etcd is not configured" in caplog.text
    await start_front(placement_interval_s=5, etcd=(etcd_endpoint,), engine_id="dense")
    assert "the model has no experts" in caplog.text
    etcd = Etcd([etcd_endpoint])
    groups = await list_groups(etcd)
    assert not any("dense" in state.applied for state in groups.values())
    await etcd.close()
