"""Which cached entries a row attends to: scores of an indexer, and the best of them.

scores.py  kernel: an indexer's scores of the entries that a row may attend to
best.py    kernel: the numbers of the best ones, without a sort
choose.py  launches both, for so many rows at a time that the scores' memory is bounded
"""
