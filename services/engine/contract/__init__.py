"""Records and interfaces that the engine's folders exchange. Imports nothing else of the engine.

messages.py                       messages between front and core
core_client.py, core_link.py      how the front reaches its core, and the socket pair behind it
runner.py                         what a worker requires of a model runner
config.py, memory_size.py         configuration keys of the core
sampling_params.py                how one request samples its tokens and when it stops;
                                  param_types.py: its types; finish_reason.py: why it ended
model_config.py                   shape of a model; deepseek_v4.py, deepseek_v41.py: of these two
expert_placement.py               a placement of experts, and when it fits
"""
