"""Products of rows with weights in Triton.

accumulate.py  the sum over the depth of one tile, for every format of weights
"""
