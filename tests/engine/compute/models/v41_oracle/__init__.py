"""An oracle of DeepSeek V4.1's text model: dense, slow, whole matrices, no cache but plain lists.

Written from the published description alone, before and apart from any model of the engine, and
imports nothing of it. Everything is computed in the format of the weights: float64 for golden
values, float32 to see what rounding does.

shape.py        a tiny shape by the published config keys; published.py: as config.json has them
weights.py      names, sizes, random weights
formats.py      norms, rotation, the quantisers that are part of the model
compressor.py   compressed entries and index keys; selection.py: which of them a row attends to
attention.py    window and compressed entries under one softmax
streams.py      hyper-connections; experts.py: the feed-forward part; engram.py: look-ups by n-gram
oracle.py       the model: whole, in chunks, replayed at a hit, with the decoder cut
mutations.py    each formula broken, one by one
golden.py       the scenarios whose logits `golden.npz` holds, and the command that writes it

Letters: T rows, D hidden size, H heads, d head dimension, S streams, G compressed entries.
"""
