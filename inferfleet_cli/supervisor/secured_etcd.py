"""The etcd of a local fleet, which lets nobody in without its password."""

import json
import urllib.error
import urllib.request
from pathlib import Path

from inferfleet_cli.supervisor import dev_backends

USER = "root"
_CHEAP_BCRYPT = "--bcrypt-cost=4"
"""The password is random, so that guessing it need not be slow."""


class SecuredEtcd(dev_backends.EtcdProcess):
    """Demands the password from its first start on; its directory must be empty then."""

    def __init__(
        self, binary: dev_backends.Binary, directory: Path, port: int, password: str
    ) -> None:
        super().__init__(binary, directory, port, (_CHEAP_BCRYPT,))
        self._password = password
        self._secured = False

    def launch(self, timeout_s: float = dev_backends.START_TIMEOUT_S) -> None:
        """Start the server and wait until it answers.

        Raises:
            BackendError: it did not start, or did not take the password.
        """
        super().launch(timeout_s)
        if not self._secured:
            self._demand_password()
            self._secured = True  # a later start finds it in the data

    def erase(self) -> None:
        """Delete the data, and the password with it."""
        super().erase()
        self._secured = False

    def _demand_password(self) -> None:
        for path, body in (
            ("user/add", {"name": USER, "password": self._password}),
            ("user/grant", {"user": USER, "role": "root"}),
            ("enable", {}),
        ):
            url = f"http://{self.address}/v3/auth/{path}"
            try:
                urllib.request.urlopen(url, json.dumps(body).encode(), timeout=5.0).close()
            except (OSError, urllib.error.URLError) as error:
                self.kill()
                raise dev_backends.BackendError(
                    f"etcd did not take a password ({path}): {error}"
                ) from error
