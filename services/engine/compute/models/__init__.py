"""Model architectures, built on the operations of a kernel set.

registry.py                        architecture name → class; start here to add one
decoder.py                         the decoder that all architectures share; llama.py, qwen3.py,
                                   qwen3_moe.py: the differences
fused.py                           a dense decoder whose whole round is one compiled job
kept_weights.py                    packed weights that a start leaves for the next ones
attention.py, mlp.py, moe.py       the parts of a layer; rope.py: angles
input_metadata.py, decode_rows.py  a round's rows: positions, slots, groups that attend together
weights.py, expert_weights.py      named tensors, checked and packed; rows.py: embedding tables
"""
