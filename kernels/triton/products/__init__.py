"""Products of rows with weights in Triton.

accumulate.py  the sum over the depth of one tile, for every format of weights
codes.py       weights in 8 and 4 bits
operands.py    what a kernel reads of a weight, checked before a launch
linear.py      dense products: weights in codes, and rows whose bits never depend on others
gates.py       what opens the gate of a feed-forward network
rounding.py    float32 to a number format
"""
