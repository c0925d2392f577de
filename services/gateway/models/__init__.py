"""Which models the fleet serves, and their tokenizers and chat templates.

catalog.py          resolves names to models and revisions
alias_table.py      the alias records of etcd
fleet_registry.py   engines, balancers and aliases as etcd has them; static_engines.py: without etcd
renderer.py         renders chats, within limits; render_process.py: the processes for some
render_main.py      such a process
text_store.py       tokenizers and chat templates, fetched from engines
"""
