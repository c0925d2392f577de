"""The `inferfleet` command. `generate` and `chat` need no services; most others do."""
