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
        "host:port of the etcd to register in; empty: the engine is not announced"
    )
    kvcache: str = setting(
        "", "host:port of the KV-cache service that learns which blocks are held; empty: none"
    )
    tool_parser: str = setting(
        "auto",
        "how calls of tools are written by this model; auto: as its chat template tells, none: "
        "calling tools is refused",
        choices=TOOL_PARSERS,
    )
    reasoning_parser: str = setting(
        "auto",
        "how this model marks its reasoning; auto: as its chat template tells, none: it is text",
        choices=REASONING_PARSERS,
    )
    public: bool = setting(
        False, "also serve inferfleet.v1.Inference, for a single engine without a gateway"
    )
    public_port: int = setting(
        0, "port of the public service; 0 takes a free one", low=0, high=65535
    )
    stream_buffer_tokens: int = setting(
        4096,
        "kept for a reader that has stopped reading; then its stream ends with RESOURCE_EXHAUSTED",
        unit="tokens",
        low=1,
    )
    placement_interval_s: float = setting(
        0.0,
        "how often a leader among the engines of a model looks whether another placement of its "
        "experts balances better, and writes it to etcd; 0 is never",
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
        "least rise of the balance (mean by largest load of a rank) that is worth moving weights",
        low=0,
        high=1,
    )
    placement_groups: int = setting(
        1, "expert groups of the model's router, for placement_policy=hierarchical", low=1
    )
    placement_nodes: int = setting(
        1, "machines that the ranks of one engine are on, for placement_policy=hierarchical", low=1
    )
    stall_s: float = setting(
        60.0,
        "health turns NOT_SERVING when a core with work has not finished a round for this long "
        "(or 10 times its longest round, if that is more)",
        unit="seconds",
        low=1,
    )
