"""Which models the fleet serves, and their tokenizers and chat templates.

catalog.py          resolves names to models and revisions
alias_table.py      the alias records of etcd
fleet_registry.py   engines, balancers and aliases as etcd has them; static_engines.py: without etcd
text_store.py       tokenizers and chat templates, fetched from engines
"""
