"""Decides what runs next and in which KV-cache blocks. Never imports torch; reads no clock.

scheduler.py                      which sequence computes what in the next round
policies.py, waiting_queue.py     order of admission, preemption victims; the queues
sequence.py                       state of a request and of its choices across rounds
scheduler_outputs.py              the frozen plan of one round
block_manager.py, blocks.py       blocks of a sequence; all blocks, the prefix map, eviction
state_slots.py                    slots of fixed-size state, and snapshots to restart from
window.py                         which blocks a sliding window needs
cache_events.py                   what became reusable or was evicted, for the index
kv_cache.py                       size of the cache; when blocks and slots may be reused
"""
