"""What stands behind the hops: an engine without a model on gRPC, and the same as HTTP with SSE.

A stream is `tokens` long and paced at `rate` tokens a second; 0: one message after the other, as
fast as they are taken. A paced source joins what is due while its last message was not taken yet,
as the engine's front does.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import uvloop

from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc
from inferfleet_proto.v1 import inference_pb2
from services.common import rpc
from services.common.rpc.carrier import RunMany, wait_sent
from services.common.text.byte_level import byte_assets

MODEL = "bench"
# The seed of a request sets the rate, because every hop forwards it unchanged.
UNPACED = 0
WORD, TOKEN = " word", 123


async def due(tokens: int, rate: int) -> AsyncIterator[int]:
    """Numbers of tokens to send now, until all are sent."""
    began, sent = time.monotonic(), 0
    while sent < tokens:
        ready = sent + 1
        if rate != UNPACED:
            ready = min(int((time.monotonic() - began) * rate), tokens)
            if ready <= sent:
                await asyncio.sleep(max(began + (sent + 1) / rate - time.monotonic(), 0))
                ready = sent + 1
        yield ready - sent
        sent = ready


class StreamingEngine(engine_pb2_grpc.EngineServicer):
    """Answers what a balancer and a gateway ask, and streams."""

    def __init__(self, address: str = "") -> None:
        self.info = engine_pb2.EngineInfo(
            engine_id="e",
            epoch_ms=1,
            model=MODEL,
            model_revision="1",
            address=address,
            block_size=32,
            max_num_seqs=4096,
            max_model_len=1_000_000,
            vocab_size=300,
            tokenizer_digest=byte_assets().digest,
        )
        self.many = RunMany(
            self.Run,
            parse=engine_pb2.EngineRequest.FromString,
            serialise=inference_pb2.GenerateResponse.SerializeToString,
        )

    async def GetInfo(self, request, context):
        return self.info

    async def GetTokenizer(self, request, context):
        for chunk in byte_assets().chunks():
            yield chunk

    async def WatchLoad(self, request, context):
        while True:
            yield engine_pb2.LoadReport(engine_id="e", epoch_ms=1, total_blocks=1_000_000)
            await asyncio.sleep(0.5)

    async def RunMany(self, request_iterator, context):
        await self.many(request_iterator, context)

    async def Run(self, request, context):
        make, inner = inference_pb2.GenerateResponse, request.request
        rate, tokens = inner.sampling.seed, inner.stop.max_tokens
        yield make(started=inference_pb2.Started(request_id=inner.request_id))
        async for count in due(tokens, rate):
            yield make(
                delta=inference_pb2.Delta(
                    text=WORD * count, token_ids=[TOKEN] * count, num_tokens=count
                )
            )
            await wait_sent(context)
        usage = inference_pb2.Usage(completion_tokens=tokens)
        yield make(summary=inference_pb2.Summary(exact=True, usage=usage))


async def serve_engine() -> None:
    """Print the engine's address and serve."""
    server, engine = rpc.make_server(), StreamingEngine()
    engine_pb2_grpc.add_EngineServicer_to_server(engine, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    engine.info.address = f"127.0.0.1:{port}"
    print(engine.info.address, flush=True)
    await asyncio.Event().wait()


async def serve_sse() -> None:
    """An OpenAI-compatible server as routers of other projects expect one behind them."""
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, limit=1 << 20)
    print(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            lines = head.decode().split("\r\n")
            lengths = [int(x[15:]) for x in lines if x.lower().startswith("content-length:")]
            body = await reader.readexactly(lengths[0]) if lengths else b""
            if lines[0].startswith("POST"):
                await _stream(writer, json.loads(body))
            else:
                about = {"model_path": MODEL, "object": "list", "data": [{"id": MODEL}]}
                text = json.dumps(about).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                    b"content-length: %d\r\n\r\n%s" % (len(text), text)
                )
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _stream(writer: asyncio.StreamWriter, body: dict) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    event = {"id": "r", "object": "chat.completion.chunk", "model": MODEL, "created": 1}
    tokens = body.get("max_tokens") or body["max_completion_tokens"]  # routers rename it
    async for count in due(tokens, int(body["seed"])):
        event["choices"] = [{"index": 0, "delta": {"content": WORD * count}, "finish_reason": None}]
        _chunk(writer, b"data: %s\n\n" % json.dumps(event).encode())
        await writer.drain()
    _chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def run(role: str) -> None:
    """The process of one source."""
    uvloop.run(serve_engine() if role == "engine" else serve_sse())
