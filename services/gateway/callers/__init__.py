"""Who calls, what they may use, and what is recorded about it.

tenants.py, keys_file.py   API keys → identities with limits
access.py                  authentication, with its audit record
quota/                     requests and tokens per minute, requests at once
records/                   usage records and the audit log
usage_recorder.py          quotas, usage records and audit log as configured
"""
