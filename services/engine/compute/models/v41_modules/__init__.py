"""DeepSeek V4.1 (DeepSeek-AI 2026), of the parts of V4 where the two are equal (`v4_modules`).

model.py        embedding, layers, last norm, head; start here
attention.py    a layer's attention: window, and the entries that an index has chosen
compressor.py   makes one entry, and its index key, of one or two positions
selection.py    chooses the entries that rows attend to; blocks of candidates for later choices
engram.py       look-ups by n-gram, added to the residual streams
quantisers.py   the roundings of keys, entries and index keys that the model was trained with
memory.py       views of a request's history by block and its state by slot; sizes
round_plan.py   where the rows of a round read and write in that memory
"""
