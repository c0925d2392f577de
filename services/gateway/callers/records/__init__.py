"""Usage records and the audit log. No record ever holds a prompt."""
