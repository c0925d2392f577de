"""Quotas per tenant and per key: requests and tokens per minute, requests at once.

`Quotas` admits and settles; `shared` counts in Redis for all gateways, `local` in this process
while Redis is away.
"""
