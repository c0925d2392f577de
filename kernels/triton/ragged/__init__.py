"""Attention over all sequences of a round: paged keys and values, or latents.

softmax.py   a split of positions attended to by some rows, and how splits are joined
tiles.py     sizes of tiles by head size
decode.py    kernels for sequences with one row: splits in parallel, then joined
extend.py    kernel for sequences with any number of rows: splits one after another
attention.py launches both for grouped query heads
latent.py    the same for latent vectors (MLA)

The positions of a sequence are cut into splits of fixed length, counted from its first position. A
row attends to each split apart, and the splits are joined in their order. All kernels do so with
the same tiles, so a row's result depends on nothing but its sequence and position: it is the same
alone and in a batch, decoded and as part of a prompt.
"""
