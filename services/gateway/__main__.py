"""`python -m services.gateway`: start one gateway."""

import sys

from services.common.config.settings import load_or_exit
from services.common.service import lifecycle
from services.gateway.config import GatewayConfig
from services.gateway.service import GatewayService

PROG = "python -m services.gateway"
DESCRIPTION = """The fleet's face: inferfleet.v1.Inference over gRPC and an OpenAI-compatible
HTTP server. Renders, tokenises and checks requests, then sends them to a balancer.
Example: python -m services.gateway --etcd 127.0.0.1:2379"""


def main() -> int:
    """The process's exit status."""
    config = load_or_exit(GatewayConfig, sys.argv[1:], prog=PROG, description=DESCRIPTION)
    return lifecycle.run(lambda: GatewayService(config), prog=PROG)


if __name__ == "__main__":
    sys.exit(main())
