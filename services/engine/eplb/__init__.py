"""Expert placement (EPLB): which expert slot holds which logical expert.

It does not balance requests between engines.

policy.py           placements from loads; packing.py, spread.py: their steps
planning.py         plans a map and decides whether to write it
placement_map.py    the records in etcd; placement_store.py: their keys and transactions
controller.py       the group's controller, which writes maps
watcher.py          follows the map for one engine
"""
