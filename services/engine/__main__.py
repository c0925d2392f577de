"""`python -m services.engine`: one engine, a front process and a core process."""

import sys
from typing import TYPE_CHECKING

from services.common.service import lifecycle
from services.common.service.telemetry import Telemetry
from services.engine.contract.core_link import CoreLink
from services.engine.front.config import FrontConfig

if TYPE_CHECKING:
    from services.engine.front.service import EngineService

DESCRIPTION = """\
Serves one model: the internal Engine service for a fleet and, with --public, the public Inference
service for clients. Without --model it serves the small model that `make run` fetches.
"""


def make_service(config: FrontConfig, opened: Telemetry) -> "EngineService":
    """Make the front, and let the core load on another CPU while it is imported.

    Raises:
        ConfigError: as EngineService.
    """
    core = CoreLink()
    core.spawn(config)
    from services.engine.front.service import EngineService

    return EngineService(config, opened, core)


if __name__ == "__main__":
    sys.exit(
        lifecycle.main(
            "engine",
            FrontConfig,
            make_service,
            description=DESCRIPTION,
            attributes=lambda config: (
                {"inferfleet.engine_id": config.engine_id} if config.engine_id else {}
            ),
        )
    )
