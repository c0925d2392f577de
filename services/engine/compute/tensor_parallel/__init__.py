"""Tensor parallelism: one dense model split over ranks as in Megatron-LM (Shoeybi et al. 2019).

shard.py      the part of each weight that a rank holds, and the two sums that a layer needs
runner.py     rank 0: a ModelRunner whose calls the other ranks repeat
commands.py   commands from rank 0 to the other ranks
rank_main.py  the process of another rank
"""
