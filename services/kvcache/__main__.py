"""`python -m services.kvcache`: the prefix index over Redis."""

import sys

from services.common.config.settings import load_or_exit
from services.common.service import lifecycle
from services.kvcache.config import KvCacheConfig
from services.kvcache.service import KvCacheService

_DESCRIPTION = (
    "Keeps in Redis which engine holds which reusable block, and tells the balancer how much of a "
    "prompt each engine has. Redis may go away and come back: requests go on without it meanwhile."
)


def main() -> int:
    """Run the service; returns the exit status."""
    prog = "python -m services.kvcache"
    config = load_or_exit(KvCacheConfig, sys.argv[1:], prog=prog, description=_DESCRIPTION)
    return lifecycle.run(lambda: KvCacheService(config), prog=prog)


if __name__ == "__main__":
    raise SystemExit(main())
