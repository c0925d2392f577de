"""The four services of a fleet, one folder each, and `common`: what at least two of them use.

The services never import one another. docs/architecture.md draws the processes.
"""

import os

# gRPC's C library writes plain lines to stderr, e.g. one per failed TLS handshake. Log lines are
# JSON; what concerns a call is in its status. The library reads the variable when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
