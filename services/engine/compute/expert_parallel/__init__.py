"""Expert parallelism: rank 0 is the engine's core process, the other ranks hold experts only.

slot_map.py     maps logical experts to physical slots; replicas alternate by tiles of rows
bank.py         the experts that one rank holds, and those that it prepares
experts.py      dispatch, compute and combine: the call that a layer makes, on every rank
expert_load.py  tokens per expert, for the placement policy
lone.py         the experts of one process whose rounds are compiled: placements and counts only
grouped.py      the experts of one process on a set that runs a layer's experts in one call
leader.py       rank 0: starts the other ranks and sends them commands
commands.py     these commands
rank_main.py    the process of another rank
"""
