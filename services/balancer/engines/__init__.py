"""The engines as this balancer sees them.

registry.py      which engines are registered and usable
member.py        one engine: record, load, requests in flight
load_watch.py    follows the load reports of one engine
breaker.py       stops sending to an engine that fails
recall.py        recalls requests that wait at a full engine
engine_view.py   the frozen records that policies see
decayed_sum.py   a sum that forgets its older parts
"""
