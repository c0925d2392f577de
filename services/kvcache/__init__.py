"""The KV-cache service: an index in Redis of which engine holds which reusable block.

service.py, servicer.py   the process and its gRPC service; config.py: its options; metrics.py
events.py                 checked Publish requests
publishers.py             the engines' Publish streams
index.py                  the prefix index: reads and writes; entry_reads.py: its reads, encoded
prefix_match.py           the longest prefix per engine, from entries as Redis returns them
sweeper.py                removes entries without an owner
redis_*.py                the connection to Redis: settings, primaries, failover, fast reads
lua/                      scripts that write; owners.lua describes the keys
"""
