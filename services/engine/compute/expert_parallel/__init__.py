"""Experts spread over ranks: rank 0 is the engine's core, the others hold nothing but experts.

slot_map.py    logical experts to physical slots; replicas take turns by tiles of rows
bank.py        the experts that one rank holds, and those it prepares
groups.py      how ranks exchange rows: not at all, or over gloo
experts.py     dispatch, compute, combine: the call that a layer makes, on every rank
commands.py    what rank 0 tells the others; rank_main.py their process; leader.py rank 0's side
"""
