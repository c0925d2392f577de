"""Usage records and the audit log. No record ever holds a prompt.

usage.py       one record per authenticated request; stream_log.py: the same to a Redis stream
audit.py       who called and what was allowed
line_log.py    JSON lines to a rotating file, in a thread
"""
