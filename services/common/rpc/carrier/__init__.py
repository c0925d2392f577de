"""Many Run streams of two services in one gRPC call (RunMany), each with a window of its own.

A message costs a gRPC hop some 50 µs of CPU whatever its size. Here what all streams have to say
at a time is one message: while one is being written, the next gathers. See docs/adr/0011.
"""

from services.common.rpc.carrier.call import take
from services.common.rpc.carrier.link import Link
from services.common.rpc.carrier.server import RunMany, drained

__all__ = ["Link", "RunMany", "drained", "take"]
