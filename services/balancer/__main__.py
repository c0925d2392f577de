"""Entry point of the balancer: `python -m services.balancer`."""

from services.balancer.config import BalancerConfig
from services.balancer.service import BalancerService
from services.common.service import lifecycle

DESCRIPTION = """Sends each request to the engine that is likely to answer it first, streams the
answer back, and resumes the stream on another engine if the first one fails. It finds the engines
in etcd, and gets from kvcache how much of a prompt each engine has in its cache. Example:
python -m services.balancer --etcd 127.0.0.1:2379 --kvcache 127.0.0.1:50070 --port 50060."""

if __name__ == "__main__":
    raise SystemExit(
        lifecycle.main("balancer", BalancerConfig, BalancerService, description=DESCRIPTION)
    )
