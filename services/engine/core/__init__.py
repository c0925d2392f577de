"""The core process of an engine: one round after another, from plan to sampled tokens.

process.py           the loop: receives messages, runs rounds, sends results
llm_engine.py        `LLMEngine.step`: one round; step_result.py: what it returns
open_requests.py     the requests from arrival to release; failures.py: what ends one early
worker.py            runs rounds on the device, in a thread of its own
request_checks.py    checks a request against the model's limits; deadlines.py: its deadline
endings.py           whether a choice ends with its last token
sampling_rows.py     what the sampler needs of one sequence; timing.py: measured rates
constraints.py       grammars of requests that wait or run
expert_control.py    switches expert placements between rounds
engine_factory.py    builds an engine from its configuration
"""
