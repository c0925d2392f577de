"""`python -m services.kvcache`: runs the KV-cache service."""

import sys

from services.common.service import lifecycle
from services.kvcache.config import KvCacheConfig
from services.kvcache.service import KvCacheService

DESCRIPTION = (
    "Keeps an index in Redis of which engine holds which reusable block, and answers the balancer "
    "how much of a prompt each engine has. While Redis is unavailable, requests run without it."
)

if __name__ == "__main__":
    sys.exit(lifecycle.main("kvcache", KvCacheConfig, KvCacheService, description=DESCRIPTION))
