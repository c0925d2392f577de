"""`python -m services.engine`: one engine, a front process and a core process."""

import sys

from services.common.service import lifecycle
from services.engine.front.config import FrontConfig
from services.engine.front.service import EngineService

DESCRIPTION = """\
Serves one model: the internal Engine service for a fleet and, with --public, the public Inference
service for clients. Without --model it serves the small model that `make run` fetches.
"""


if __name__ == "__main__":
    sys.exit(
        lifecycle.main(
            "engine",
            FrontConfig,
            EngineService,
            description=DESCRIPTION,
            attributes=lambda config: (
                {"inferfleet.engine_id": config.engine_id} if config.engine_id else {}
            ),
        )
    )
