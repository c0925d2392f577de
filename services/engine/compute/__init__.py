"""Everything of the engine that imports torch. Runs in the core process and in the rank processes.

model_runner.py                     owns weights, block tensors and the device
simulated_runner.py                 takes its place with `--simulate`: arithmetic instead of tensors
models/, loader/, sampling/         architectures; reading weights; logits → tokens
ranks/, tensor_parallel/, expert_parallel/   several processes for one model
model_setup.py                      device, kernel set and length, before weights are read
numerics.py, memory.py              the numerics id; free memory and what a round takes
state_cache.py                      slots of fixed-size state, as bytes
"""
