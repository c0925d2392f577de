"""One dense model on several ranks, split as Megatron-LM splits it (Shoeybi et al. 2019).

shard.py      which part of each weight a rank holds, and the two sums a layer needs
runner.py     rank 0: a ModelRunner that has the others run the same round
rank_main.py  the other ranks' process; commands.py what they are told
"""
