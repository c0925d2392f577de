"""Quotas per tenant and per key: requests and tokens per minute, requests at once.

quotas.py    admits requests and settles their real usage
shared.py    counts in Redis, for all gateways together (scripts in lua/)
local.py     counts in this process while Redis is away
verdict.py   the result of counting, as an error or as x-ratelimit-* headers
fit.py       refuses requests that exceed a whole quota
"""
