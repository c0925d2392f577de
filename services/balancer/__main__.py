"""`python -m services.balancer`: places each request on an engine and carries its stream."""

import sys

from services.balancer.config import BalancerConfig
from services.balancer.service import BalancerService
from services.common.config.settings import load_or_exit
from services.common.service import lifecycle, telemetry

PROG = "python -m services.balancer"
DESCRIPTION = """Places each request on the engine that is likely to answer it first, streams the
answer back, and carries the stream on elsewhere when the engine dies. Engines are found in etcd,
reusable prefixes by asking kvcache. Example: python -m services.balancer --etcd 127.0.0.1:2379
--kvcache 127.0.0.1:50070 --port 50060."""


def main() -> int:
    """Run until SIGTERM; returns the exit status."""
    config = load_or_exit(BalancerConfig, sys.argv[1:], prog=PROG, description=DESCRIPTION)
    traces = telemetry.setup(
        "balancer", otlp_endpoint=config.otlp_endpoint, log_level=config.log_level
    )
    try:
        return lifecycle.run(lambda: BalancerService(config, traces), prog=PROG)
    finally:
        traces.close()


if __name__ == "__main__":
    raise SystemExit(main())
