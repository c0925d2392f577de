"""`python -m services.engine`: one engine, front and core."""

import sys

from services.common.config.settings import load_or_exit
from services.common.service import lifecycle, telemetry
from services.engine.contract.core_link import CoreLink
from services.engine.front.config import FrontConfig
from services.engine.front.service import EngineServer

PROG = "python -m services.engine"
DESCRIPTION = """\
Serves one model: the internal Engine service for a fleet, and with --public the public Inference
service for a client. Without --model it serves the small model that `make run` fetches.
"""


def main() -> int:
    """Run until SIGTERM; 0 after a drain, 1 if the core died, 2 for a bad configuration."""
    config = load_or_exit(FrontConfig, sys.argv[1:], prog=PROG, description=DESCRIPTION)
    return lifecycle.run(lambda: _make(config), prog=PROG)


def _make(config: FrontConfig) -> EngineServer:
    tracing = telemetry.setup(
        "engine",
        otlp_endpoint=config.otlp_endpoint,
        log_level=config.log_level,
        attributes={"inferfleet.engine_id": config.engine_id} if config.engine_id else None,
    )
    return EngineServer(config, CoreLink(), tracing)


if __name__ == "__main__":
    sys.exit(main())
