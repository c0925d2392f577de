"""`python -m services.gateway` starts one gateway."""

import sys

from services.common.service import lifecycle
from services.gateway.config import GatewayConfig
from services.gateway.service import GatewayService

DESCRIPTION = """The public face of the fleet: inferfleet.v1.Inference over gRPC and an
OpenAI-compatible HTTP server. Checks, renders and tokenizes requests and sends them to a balancer.
Example: python -m services.gateway --etcd 127.0.0.1:2379"""

if __name__ == "__main__":
    sys.exit(lifecycle.main("gateway", GatewayConfig, GatewayService, description=DESCRIPTION))
