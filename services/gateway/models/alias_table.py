"""The alias records of etcd as a gateway uses them: a bad record is refused and reported, and the
last good one of its name stays in use, also when etcd has lost it."""

import logging
from collections.abc import Mapping
from typing import Protocol

from services.common.etcd.client import Etcd, EtcdError
from services.common.etcd.model_alias import (
    MODELS_PREFIX,
    AliasError,
    AliasRecord,
    check_alias,
    parse_record,
)

log = logging.getLogger(__name__)


class Keys(Protocol):
    """The part of services.common.etcd.registry.RegistryView that is needed here."""

    @property
    def connected(self) -> bool:
        """Whether the snapshot is current."""

    def snapshot(self) -> Mapping[str, bytes]:
        """Key to value, as last known."""

    async def wait_change(self, version: int) -> int:
        """Return the newer version once there is one."""


class AliasTable:
    """Owns what is in use.

    Args:
        view: of the keys below MODELS_PREFIX; None: there is no etcd, and no alias.
    """

    def __init__(self, view: Keys | None) -> None:
        self.view = view
        self.records: Mapping[str, AliasRecord] = {}
        """Good records by alias; replaced as a whole."""
        self.problems: Mapping[str, str] = {}
        """What is wrong with the records that are refused now, by alias."""
        self._known: dict[str, AliasRecord] = {}
        """Records by alias, deleted ones and those that etcd has lost included."""
        self._raw: dict[str, bytes] = {}

    def refresh(self) -> None:
        """Take the view's snapshot.

        A store that comes back empty empties nothing here: what was deleted on purpose says so.
        """
        if self.view is None:
            return
        raw = {key[len(MODELS_PREFIX) :]: value for key, value in self.view.snapshot().items()}
        if raw == self._raw:
            return
        known, problems = dict(self._known), {}
        for alias, value in raw.items():
            try:
                check_alias(alias)
                known[alias] = parse_record(value)
            except AliasError as error:
                problems[alias] = str(error)
                if self._raw.get(alias) != value:
                    log.error("alias %s: record refused, the last good one stays: %s", alias, error)
        records = {alias: record for alias, record in known.items() if not record.deleted}
        self._log_news(records)
        self._raw, self._known, self.problems = raw, known, problems
        self.records = records

    async def restore(self, etcd: Etcd) -> None:
        """Write again what a store has lost; whoever is first wins, and etcd away is no error."""
        if self.view is None or not self.view.connected:
            return
        for alias in [alias for alias in self._known if alias not in self._raw]:
            record = self._known[alias]
            try:
                done = await etcd.compare_and_put(
                    MODELS_PREFIX + alias, record.to_json(), mod_revision=0
                )
            except EtcdError as error:
                log.warning("alias %s cannot be written again yet: %s", alias, error)
                return
            if done is not None:
                log.warning("alias %s was lost with its store: written again", alias)

    def _log_news(self, records: Mapping[str, AliasRecord]) -> None:
        for alias, record in records.items():
            if record != self.records.get(alias):
                shares = ", ".join(
                    f"{model}@{revision} {share:.1%}"
                    for (model, revision), share in record.shares.items()
                )
                log.info("alias %s, version %d: %s", alias, record.version, shares)
        for alias in self.records.keys() - records.keys():
            log.info("alias %s is gone", alias)
