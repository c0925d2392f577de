"""Rounds that the host launches and does not wait for, with kernels that take ragged batches.

layout.py    a round as one array of words, and its places
rounds.py    `DeviceRounds`: one copy up, the forward, the draw, one copy down
graphs.py    decode rounds captured by number of sequences and length
results.py   what a round's copies down become: tokens and log-probabilities
"""
