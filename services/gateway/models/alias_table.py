"""The alias records of etcd, as a gateway uses them.

An invalid record is refused and reported; the last valid one of its name stays in use, even if etcd
has lost it.
"""

import logging
from collections.abc import Mapping

from services.common.etcd.client import Etcd, EtcdError
from services.common.etcd.model_alias import (
    MODELS_PREFIX,
    AliasError,
    AliasRecord,
    check_alias,
    parse_record,
)
from services.common.etcd.registry import RegistryRecords

log = logging.getLogger(__name__)


class AliasTable:
    """Owns the records in use.

    Args:
        view: the keys below MODELS_PREFIX; None without etcd, and then there is no alias.
    """

    def __init__(self, view: RegistryRecords | None) -> None:
        self.view = view
        self.records: Mapping[str, AliasRecord] = {}
        """Valid records by alias; replaced as a whole."""
        self.problems: Mapping[str, str] = {}
        """The errors of refused records, by alias."""
        self._known: dict[str, AliasRecord] = {}
        """Records by alias, including deleted ones and those that etcd has lost."""
        self._raw: dict[str, bytes] = {}
        """The last snapshot, by alias."""

    def refresh(self) -> None:
        """Read the view's snapshot.

        If etcd returns without data, the last known aliases are kept: an alias that was deleted on
        purpose has a record that says so.
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
                    log.error(
                        "alias %s: invalid record, keeping the last valid one: %s", alias, error
                    )
        records = {alias: record for alias, record in known.items() if not record.deleted}
        self._log_changes(records)
        self._raw, self._known, self.problems = raw, known, problems
        self.records = records

    async def restore(self, etcd: Etcd) -> None:
        """Write records that etcd has lost. The first gateway wins; etcd being away is no error."""
        if self.view is None or not self.view.connected:
            return
        for alias in [alias for alias in self._known if alias not in self._raw]:
            record = self._known[alias]
            try:
                done = await etcd.compare_and_put(
                    MODELS_PREFIX + alias, record.to_json(), mod_revision=0
                )
            except EtcdError as error:
                log.warning("alias %s: cannot restore its record yet: %s", alias, error)
                return
            if done is not None:
                log.warning("alias %s: restored its record, which etcd had lost", alias)

    def _log_changes(self, records: Mapping[str, AliasRecord]) -> None:
        for alias, record in records.items():
            if record != self.records.get(alias):
                shares = ", ".join(
                    f"{model}@{revision} {share:.1%}"
                    for (model, revision), share in record.shares.items()
                )
                log.info("alias %s: version %d: %s", alias, record.version, shares)
        for alias in self.records.keys() - records.keys():
            log.info("alias %s: deleted", alias)
