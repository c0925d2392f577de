"""Records and interfaces that the engine's folders exchange. Imports nothing else of the engine.

messages.py, core_link.py         messages between front and core, and the socket pair
runner.py                         what a worker requires of a model runner
config.py                         configuration keys of the core
sampling_params.py                how one request samples its tokens and when it stops
model_config.py                   shape of a model
expert_placement.py               a placement of experts, and when it fits
"""
