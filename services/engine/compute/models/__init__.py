"""Model architectures, built on the operations of a kernel set.

architectures/                     one declaration per architecture; start here to add one
architecture.py                    what a declaration consists of
decoder.py                         the decoder that is built from a declaration
registry.py                        makes a model from its weights, layer by layer or as whole rounds
fused.py                           a dense decoder whose whole round is one compiled job
kept_weights.py                    packed weights that a start leaves for the next ones
attention.py, mlp.py, moe.py       the parts of a layer; rope.py: angles
latent_attention.py, indexer.py    attention of DeepSeek's layers
mtp.py                             layers that draft tokens, which are kept and not run
cache_tensors.py                   which tensors the KV cache consists of
input_metadata.py, decode_rows.py  a round's rows: positions, slots, groups that attend together
v4_modules/, v41_modules/          DeepSeek V4 and V4.1
weights.py, expert_weights.py      named tensors, checked and packed; rows.py: embedding tables
"""
