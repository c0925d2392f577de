"""The engine's record in the fleet's registry: what the engine is, under its lease in etcd."""

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
from services.engine.front.load_report import LoadState

_ENGINE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def choose_engine_id(config: FrontConfig) -> str:
    """Return the configured engine id, or a generated one.

    Raises:
        ConfigError: the configured id has other characters than an etcd key may have.
    """
    if not config.engine_id:
        return f"engine-{secrets.token_hex(4)}"
    if not _ENGINE_ID.fullmatch(config.engine_id):
        raise ConfigError(
            "engine_id: must be at most 64 letters, digits, '.', '_' or '-' and begin with a "
            f"letter or digit, got {config.engine_id!r}"
        )
    return config.engine_id


def engine_info(
    config: FrontConfig,
    ready: CoreReady,
    assets: TextAssets,
    *,
    engine_id: str,
    epoch_ms: int,
    address: str,
) -> engine_pb2.EngineInfo:
    """The record that GetInfo returns and the registry holds."""
    return engine_pb2.EngineInfo(
        engine_id=engine_id,
        epoch_ms=epoch_ms,
        address=address,
        model=ready.info.model,
        model_revision=ready.info.model_revision,
        hash_namespace=ready.hash_namespace,
        numerics_id=ready.info.numerics_id,
        block_size=ready.block_size,
        num_blocks=ready.num_blocks,
        max_model_len=ready.max_model_len,
        max_num_seqs=ready.max_num_seqs,
        vocab_size=ready.info.vocab_size,
        tokenizer_digest=assets.digest,
        dtype=config.dtype,
        deterministic=config.deterministic or ready.info.bit_identical,
        role="both",
        eos_token_ids=ready.info.eos_token_ids,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
        needs_state=ready.info.state is not None and ready.info.state.replay is None,
    )


class RegistryEntry:
    """Keeps the engine's record in etcd up to date; does nothing without etcd.

    Args:
        etcd: None for an engine that registers nowhere.
    """

    def __init__(
        self, info: engine_pb2.EngineInfo, load_state: LoadState, etcd: Etcd | None
    ) -> None:
        self._info = info
        self._load_state = load_state
        self._etcd = etcd
        self._registration: Registration | None = None

    async def start(self) -> None:
        """Begin to register in the background; returns at once, also if etcd is unavailable."""
        if self._etcd is None:
            return
        key = ENGINES_PREFIX + self._info.engine_id
        self._registration = Registration(self._etcd, key, self._encode)
        await self._registration.start()

    async def refresh(self) -> None:
        """Write the record again: the drain flag or the placement version changed."""
        if self._registration is not None:
            await self._registration.refresh()

    async def stop(self) -> None:
        """Delete the record; idempotent."""
        registration, self._registration = self._registration, None
        if registration is not None:
            await registration.stop()

    def _encode(self) -> bytes:
        """The current record as proto JSON."""
        self._info.draining = self._load_state.draining
        self._info.placement_version = self._load_state.placement_version
        text = json_format.MessageToJson(self._info, preserving_proto_field_name=True, indent=None)
        return text.encode()
