"""Processes (ranks) that serve one engine together.

process.py, channel.py, answers.py   rank 0 starts the other ranks and sends them commands
groups.py                            all ranks exchange tensors
partition.py                         the part of a model that a rank holds

What the ranks compute is defined in `expert_parallel` and `tensor_parallel`.
"""
