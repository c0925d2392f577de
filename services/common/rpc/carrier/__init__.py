"""Carries many Run streams of two services in one gRPC call (RunMany); see docs/adr/0011.

A message costs a gRPC hop about 50 µs of CPU, however short it is. Here the frames of all streams
that are pending at one time form one message. Each stream has its own flow-control window.

    connection.py   calling side: Run at one peer, carried or as a call of its own
    carrier.py      calling side: one RunMany call
    call.py         calling side: one carried stream
    proving.py      calling side: a Run call whose peer must prove itself first
    server.py       answering side: the handler of RunMany
    context.py      answering side: one carried stream
    outbox.py       both sides: writes pending frames as one message
    surface.py      the part of gRPC's call and context that a carried stream offers
"""

from services.common.rpc.carrier.call import take_messages
from services.common.rpc.carrier.connection import CarrierConnection, close_when_idle
from services.common.rpc.carrier.context import wait_sent
from services.common.rpc.carrier.server import RunMany
from services.common.rpc.carrier.surface import RunCall, RunContext

__all__ = [
    "CarrierConnection",
    "RunCall",
    "RunContext",
    "RunMany",
    "close_when_idle",
    "take_messages",
    "wait_sent",
]
