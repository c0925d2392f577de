"""Everything of the engine that imports torch. Runs in the core process and in the rank processes.

model_runner.py                     owns weights, block tensors and the device
simulated_runner.py                 takes its place with `--simulate`: arithmetic instead of tensors
models/, loader/, sampling/         architectures; reading weights; logits → tokens
ranks/, tensor_parallel/, expert_parallel/   several processes for one model
numerics.py                         the numerics id
"""
