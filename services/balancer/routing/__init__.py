"""Which engine gets a request.

router.py            filters the engines, then calls a policy
policies/            the policies; each is a pure function
prefix_match.py      gets from the KV-cache service how much of the prompt each engine holds
prefix_holds.py      prefixes of requests in flight, which the index does not list yet
decision_ledger.py   recent decisions, for Explain
"""
