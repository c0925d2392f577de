"""The configuration keys of an engine: those of its core and those of its front."""

from dataclasses import dataclass

from services.common.config.service_config import ServiceConfig
from services.common.config.settings import setting
from services.common.etcd.config import EtcdKeys, endpoints_setting
from services.common.text.parser_names import REASONING_PARSERS, TOOL_PARSERS
from services.engine.contract.config import EngineConfig

PLACEMENT_POLICIES = ("global", "hierarchical")


@dataclass(frozen=True)
class FrontConfig(EngineConfig, EtcdKeys, ServiceConfig):
    """Keys of `python -m services.engine`."""

    engine_id: str = setting("", "name of this engine in the fleet; default: generated")
    etcd: tuple[str, ...] = endpoints_setting(
        "host:port of the etcd to register in; empty: the engine does not register"
    )
    kvcache: str = setting(
        "", "host:port of the KV-cache service to publish cached blocks to; empty: none"
    )
    tool_parser: str = setting(
        "auto",
        "format of the model's tool calls; auto: detected from its chat template, none: requests "
        "with tools are refused",
        choices=TOOL_PARSERS,
    )
    reasoning_parser: str = setting(
        "auto",
        "how the model marks its reasoning; auto: detected from its chat template, none: as text",
        choices=REASONING_PARSERS,
    )
    standby_file: str = setting(
        "",
        "while this file is missing, the loaded engine waits and does not register; `inferfleet up "
        "--spare-engines` makes it",
        written=True,
    )
    public: bool = setting(
        False, "also serve inferfleet.v1.Inference, for a single engine without a gateway"
    )
    public_port: int = setting(
        0, "port of the public service; 0 selects a free port", low=0, high=65535
    )
    stream_buffer_tokens: int = setting(
        4096,
        "buffered for a client that does not read; beyond that its stream ends with "
        "RESOURCE_EXHAUSTED",
        unit="tokens",
        low=1,
    )
    placement_interval_s: float = setting(
        0.0,
        "interval at which the leader of a model's engines plans the placement of its experts and "
        "writes it to etcd if it balances better; 0 is never",
        unit="seconds",
        low=0,
    )
    placement_policy: str = setting(
        "global",
        "how experts are placed: hierarchical keeps an expert group on one node, global ignores "
        "groups",
        choices=PLACEMENT_POLICIES,
    )
    placement_min_gain: float = setting(
        0.05,
        "least rise of the balance (mean load of a rank by the largest) for a new placement",
        low=0,
        high=1,
    )
    placement_groups: int = setting(
        1, "expert groups of the model's router, for placement_policy=hierarchical", low=1
    )
    placement_nodes: int = setting(
        1, "machines of one engine's ranks, for placement_policy=hierarchical", low=1
    )
    stall_s: float = setting(
        60.0,
        "health turns NOT_SERVING when a core with work has finished no round for this long "
        "(or for 10 times its longest round, if that is longer)",
        unit="seconds",
        low=1,
    )
