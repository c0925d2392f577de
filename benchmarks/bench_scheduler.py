"""Host cost of a decode round: scheduling, collecting and row making, by running sequences.

    python -m benchmarks.bench_scheduler --seqs 1 32 256 --rounds 300

The runner does nothing, so what is measured is the engine's own Python, in CPU time of its thread
(wall time would measure the machine's other work). Prints one JSON object.
"""

import argparse
import gc
import json
import platform
import statistics
import time

from services.engine.compute.simulated_runner import SimulatedModel, SimulatedRunner
from services.engine.contract.config import EngineConfig
from services.engine.contract.messages import AddRequest, CoreRequest
from services.engine.contract.runner import SampledToken, SamplerOutput
from services.engine.contract.sampling_params import SamplingParams
from services.engine.core.engine_factory import build_engine

PROMPT_TOKENS = 128


class _IdleRunner(SimulatedRunner):
    """Draws token 1 for every row and computes nothing."""

    def execute_main_model(self, step, batch, previous):
        return None

    def execute_sample(self, step, hidden, rows):
        return SamplerOutput(step, (SampledToken(1),) * len(rows))


def measure(num_seqs: int, rounds: int) -> dict[str, float]:
    """CPU milliseconds of one decode round with so many running sequences, medians over rounds."""
    # The first decode while the last prompts are still being computed.
    model = SimulatedModel(max_model_len=PROMPT_TOKENS + rounds + num_seqs + 64)
    config = EngineConfig(
        num_blocks=num_seqs * (model.max_model_len // 32 + 2),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(512, num_seqs),
        max_waiting=num_seqs,
    )
    engine = build_engine(config, lambda: _IdleRunner(config.block_size, model))
    params = SamplingParams(temperature=0.0, seed=1, ignore_eos=True)
    for index in range(num_seqs):
        prompt = [(index * 31 + place) % 500 + 1 for place in range(PROMPT_TOKENS)]
        engine.add_request(AddRequest(str(index), CoreRequest(prompt, params)))
    while engine.scheduler.uncached_tokens_queued():
        engine.step()
    scheduled: list[float] = []
    schedule = engine.scheduler.schedule

    def timed():
        started = time.thread_time()
        plan = schedule()
        scheduled.append(time.thread_time() - started)
        assert len(plan.batch) == num_seqs
        return plan

    engine.scheduler.schedule = timed
    gc.freeze()
    steps: list[float] = []
    for _ in range(rounds):
        started = time.thread_time()
        engine.step()
        steps.append(time.thread_time() - started)
    engine.close()
    return {
        "seqs": num_seqs,
        "schedule_cpu_ms_p50": 1e3 * statistics.median(scheduled),
        "schedule_cpu_ms_p99": 1e3 * statistics.quantiles(scheduled, n=100)[98],
        "step_cpu_ms_p50": 1e3 * statistics.median(steps),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqs", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    rows = [measure(count, args.rounds) for count in args.seqs]
    print(json.dumps({"python": platform.python_version(), "rounds": rows}, indent=1))


if __name__ == "__main__":
    main()
