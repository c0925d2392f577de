"""DeepSeek V4 (DeepSeek-AI 2026), built on torch's operators and a kernel set's products.

model.py               embedding, layers, head; start here
attention.py           a layer's attention: window, and compressed entries where it has them
shared_attention.py    projections and softmax with a sink, which V4.1 has too
compressor.py          makes one entry of several positions
indexer.py             chooses the entries that a row attends to
hyper_connections.py   several residual streams, and how a sublayer reads and writes them
experts.py             router, and the shared expert with bounds before SwiGLU
rotary.py              rotation of the trailing elements of a head, and its inverse
memory.py              views of a request's history by block and its state by slot; sizes
round_plan.py          where the rows of a round read and write in that memory
fixed_order.py         sums and functions whose result for a row does not depend on other rows
"""
