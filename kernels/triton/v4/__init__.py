"""Kernels particular to DeepSeek V4; what they compute is in `kernels.reference.v4`.

places.py       where the row of a position is: in the round, or in a ring
attention.py    window and compressed entries under one softmax with a sink, rotated back
compressor.py   entries of several positions; rows kept for those to come
streams.py      residual streams: weights by Sinkhorn's balancing, reading, spreading
variants.py     sizes of the published model, for compiling ahead of time

An indexer's choice of entries is in `kernels.triton.selected`.
"""
