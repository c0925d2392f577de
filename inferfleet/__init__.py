"""The face for people: the `inferfleet` command and the generated stubs of the contract."""

__version__ = "0.1.0"
