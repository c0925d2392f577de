"""Which models the fleet serves, and their tokenizers and chat templates.

catalog.py          resolves names to models and revisions
alias_table.py      the alias records of etcd
static_engines.py   the engine registry of a fleet without etcd
text_store.py       tokenizers and chat templates, fetched from engines
"""
