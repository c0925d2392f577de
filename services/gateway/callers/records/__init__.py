"""What a gateway writes down of requests: usage records and the audit log, never a prompt."""
