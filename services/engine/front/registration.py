"""The engine's own entry in the fleet's registry: what it is, under its lease in etcd."""

import dataclasses
import re
import secrets

from google.protobuf import json_format

from inferfleet_proto.internal.v1 import engine_pb2
from services.common.config.settings import ConfigError
from services.common.etcd.client import Etcd
from services.common.etcd.registry import ENGINES_PREFIX, Registration
from services.common.text import TextAssets
from services.engine.contract.messages import CoreReady
from services.engine.front.config import FrontConfig
from services.engine.front.load_report import LoadBoard

_WILDCARDS = ("0.0.0.0", "::", "[::]")
_ENGINE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def engine_id_of(config: FrontConfig) -> str:
    """The configured name, or a new one.

    Raises:
        ConfigError: the name cannot be a part of a key.
    """
    if not config.engine_id:
        return f"engine-{secrets.token_hex(4)}"
    if not _ENGINE_ID.fullmatch(config.engine_id):
        raise ConfigError(
            f"engine_id: letters, digits, '.', '_' and '-', at most 64; got {config.engine_id!r}"
        )
    return config.engine_id


def reachable_address(config: FrontConfig, address: str) -> str:
    """What others are told to connect to.

    Raises:
        ConfigError: nobody else could use it.
    """
    if config.etcd and not config.advertise and config.host in _WILDCARDS:
        raise ConfigError(
            f"advertise: needed, because host is {config.host} and others learn this "
            "address from etcd"
        )
    return config.advertise or address


def engine_info(
    config: FrontConfig,
    ready: CoreReady,
    assets: TextAssets,
    *,
    engine_id: str,
    epoch_ms: int,
    address: str,
) -> engine_pb2.EngineInfo:
    """What GetInfo answers and the registry holds."""
    return engine_pb2.EngineInfo(
        engine_id=engine_id,
        epoch_ms=epoch_ms,
        address=address,
        model=ready.model,
        model_revision=ready.model_revision,
        hash_namespace=ready.hash_namespace,
        numerics_id=ready.numerics_id,
        block_size=ready.block_size,
        num_blocks=ready.num_blocks,
        max_model_len=ready.max_model_len,
        max_num_seqs=config.max_num_seqs,
        vocab_size=ready.vocab_size,
        tokenizer_digest=assets.digest,
        dtype=config.dtype,
        deterministic=config.deterministic,
        role="both",
        eos_token_ids=ready.eos_token_ids,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
    )


@dataclasses.dataclass
class RegistryEntry:
    """Keeps the engine's key for ever; owns its etcd, does nothing without one."""

    info: engine_pb2.EngineInfo
    board: LoadBoard
    etcd: Etcd | None
    registration: Registration | None = None

    async def start(self) -> None:
        """Begin to register; returns at once, also with etcd away."""
        if self.etcd is None:
            return
        key = ENGINES_PREFIX + self.info.engine_id
        self.registration = Registration(self.etcd, key, self.value)
        await self.registration.start()

    def current(self) -> engine_pb2.EngineInfo:
        """The entry of this moment."""
        self.info.draining = self.board.draining
        self.info.placement_version = self.board.placement_version
        return self.info

    def value(self) -> bytes:
        """The same as proto JSON."""
        text = json_format.MessageToJson(
            self.current(), preserving_proto_field_name=True, indent=None
        )
        return text.encode()

    async def refresh(self) -> None:
        """The drain flag changed."""
        if self.registration is not None:
            await self.registration.refresh()

    async def stop(self) -> None:
        """Take the entry out; idempotent."""
        registration, self.registration = self.registration, None
        etcd, self.etcd = self.etcd, None
        if registration is not None:
            await registration.stop()
        if etcd is not None:
            await etcd.close()
