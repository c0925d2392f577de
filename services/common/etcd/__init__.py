"""etcd: a client for asyncio, and the records that more than one service keeps there.

client.py       keys, transactions, leases, watches; types.py: its records; wire.py: its protobufs
config.py       the keys for etcd and the connection made from them
registry.py     a service's own key under a lease, and a reader's view of such keys
election.py     a leader by lease, with a fence for its writes
model_alias.py  the record of a public model name
"""
