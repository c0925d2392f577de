"""The `inferfleet` command: client commands need grpcio alone, `up` needs the checkout."""
