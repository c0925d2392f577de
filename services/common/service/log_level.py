"""The log level of a process, which an operator changes while it runs."""

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class LogLevel:
    """The root logger's level, and those that follow its changes; thread-safe.

    Args:
        configured: the level that `toggle_debug` returns to.
    """

    def __init__(self, configured: str = "info") -> None:
        self._configured = configured
        self._followers: list[Callable[[str], None]] = []

    @property
    def current(self) -> str:
        """The least severe level that is logged now, in lower case."""
        return logging.getLevelName(logging.getLogger().level).lower()

    def set(self, level: str, *, by: str) -> None:
        """Log from this level on.

        Args:
            by: the origin of the change, for the log line about it.
        """
        before = self.current
        logging.getLogger().setLevel(level.upper())
        # Logged as a warning, so that the line appears at almost every level.
        log.warning("log level changed from %s to %s by %s", before, level, by)
        for follower in list(self._followers):
            follower(level)

    def toggle_debug(self) -> None:
        """Switch between `debug` and the configured level."""
        self.set("debug" if self.current != "debug" else self._configured, by="a signal")

    def follow(self, follower: Callable[[str], None]) -> Callable[[], None]:
        """Call `follower` with each new level, in the thread that sets it.

        Returns:
            A function that ends this.
        """
        self._followers.append(follower)
        return lambda: self._followers.remove(follower)
