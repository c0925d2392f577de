"""Options: one set of keys for flags, environment and file.

settings.py        reads, checks and shows them; service_config.py: keys that every service has
near_miss.py       suggestions for mistyped names
redis_keys.py      keys for one Redis and the client made from them; redis_tls.py: its TLS
"""
