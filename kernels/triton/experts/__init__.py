"""The experts of a layer in Triton: seven launches, no loop over experts.

routing.py   scores become experts and weights
align.py     the chosen rows sorted by expert and cut into tiles, counts, replicas
grouped.py   the two products, with the gate between them
combine.py   weighted sum of a row's experts, in the order of its choice
layer.py     the weights of a layer, and the launches in order

The host never reads a count: grids are as large as the worst case needs, and programs without work
end at once.
"""
