"""What one HTTP connection may send, and how slowly: heads, headers, trailers, silent bodies."""

import asyncio
import contextlib
import json
from collections import Counter

import pytest

from services.common.errors import CancelledError
from services.gateway.openai.body import decode, read_body
from services.gateway.openai.http_bounds import HttpBounds
from services.gateway.openai.http_server import HttpServer

GET = b"GET /x HTTP/1.1\r\nhost: a\r\n"
POST = b"POST /x HTTP/1.1\r\nhost: a\r\n"


class App:
    """Answers with the body that it read; `hold` keeps the answer open."""

    def __init__(self):
        self.hold = asyncio.Event()
        self.hold.set()
        self.lost = 0

    async def __call__(self, scope, receive, send):
        body = b"null"
        if scope["method"] == "POST":
            try:
                body = json.dumps(await decode(await read_body(scope, receive))).encode()
            except CancelledError:
                self.lost += 1
                return
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.hold.wait()
        await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def serve():
    """Start a server with some bounds; returns its connect function, the app and refusals."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**bounds):
            app, refused = App(), Counter()
            server = HttpServer(
                app,
                bounds=HttpBounds(**{"linger_s": 0.1, **bounds}),
                on_refused=lambda status: refused.update([status]),
            )
            host, port = (await server.start("127.0.0.1", 0)).split(":")
            stack.push_async_callback(server.stop)

            async def connect(data=b""):
                reader, writer = await asyncio.open_connection(host, int(port))
                stack.callback(writer.close)
                writer.write(data)
                return reader, writer

            return connect, app, refused

        yield start


async def answer(reader):
    """Status, headers' text and body of one answer."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode()
    length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
    return int(head.split()[1]), head, json.loads(await reader.readexactly(length))


async def dripped(reader, writer, data):
    """The answer to a client that sends `data` again and again until it has one."""
    waiting = asyncio.create_task(answer(reader))
    while not waiting.done():
        writer.write(data)
        await asyncio.wait({waiting}, timeout=0.01)
    return waiting.result()


async def closed(reader):
    return await asyncio.wait_for(reader.read(), 10) == b""


ENDLESS = {
    "many lines": (GET, b"a: b\r\n" * 10_000),
    "one line": (GET + b"a: ", b"b" * 60_000),
    "a name": (GET, b"a" * 60_000),
    "the path": (b"GET /", b"x" * 60_000),
    "empty lines": (b"", b"\r\n" * 30_000),
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_an_endless_head_is_refused_and_the_client_can_read_that(serve, kind):
    connect, _, refused = await serve(linger_s=0.5)
    first, more = ENDLESS[kind]
    reader, writer = await connect(first)
    for _ in range(10):  # 600 KB
        writer.write(more)
    status, head, body = await answer(reader)
    assert (status, refused[431]) == (431, 1)
    assert body["error"]["code"] == "head_too_large"
    assert "connection: close" in head
    assert await closed(reader)


async def test_many_small_headers_are_refused(serve):
    connect, _, _ = await serve()
    reader, _ = await connect(GET + b"a: b\r\n" * 256 + b"\r\n")
    assert (await answer(reader))[0] == 431
    reader, _ = await connect(GET + b"a: b\r\n" * 255 + b"\r\n")
    assert (await answer(reader))[0] == 200


async def test_a_head_of_nearly_the_bound_and_a_large_body_pass(serve):
    connect, _, refused = await serve()
    text = b'"' + b"x" * 3_000_000 + b'"'
    for chunked in (False, True):
        how = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(text)
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(text), text) if chunked else text
        head = POST + b"a: " + b"b" * 65_000 + b"\r\n" + how + b"\r\n\r\n"
        reader, writer = await connect(head + body)
        assert (await answer(reader))[2] == "x" * 3_000_000
        writer.write(GET + b"\r\n")  # the connection serves the next one
        assert (await answer(reader))[0] == 200
    assert not refused


async def test_trailers_and_chunk_extensions_are_bounded(serve):
    connect, app, _ = await serve()
    head = POST + b"transfer-encoding: chunked\r\n\r\n"
    for rest in (b'2\r\n""\r\n0\r\n' + b"a: " + b"b" * 300_000, b"2;" + b"e" * 300_000):
        reader, _ = await connect(head + rest)
        assert (await answer(reader))[0] == 431
        assert await closed(reader)
    await asyncio.sleep(0)
    assert app.lost == 2  # the application does not wait on


async def test_half_a_head_ends_in_time(serve):
    connect, _, refused = await serve(head_s=0.05)
    for half in (GET, b"G", GET + b"a: "):
        reader, _ = await connect(half)
        status, _, body = await answer(reader)
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert await closed(reader)
    assert refused == {408: 3}


async def test_a_drip_does_not_extend_the_time_of_a_head(serve):
    connect, _, _ = await serve(head_s=0.1)
    reader, writer = await connect(GET)
    assert (await dripped(reader, writer, b"a: b\r\n"))[0] == 408


async def test_a_connection_without_a_request_is_closed_without_an_answer(serve):
    connect, _, _ = await serve(idle_s=0.05)
    reader, _ = await connect()
    assert await closed(reader)


async def test_the_second_head_of_a_connection_has_the_same_bounds(serve):
    connect, _, _ = await serve(head_s=0.05)
    reader, writer = await connect(GET + b"\r\n" + GET)  # one and a half
    assert (await answer(reader))[0] == 200
    assert (await answer(reader))[0] == 408
    reader, writer = await connect(GET + b"\r\n")
    assert (await answer(reader))[0] == 200
    writer.write(GET + b"a: " + b"b" * 200_000)
    assert (await answer(reader))[0] == 431


async def test_half_a_head_behind_a_running_answer_does_not_break_that(serve):
    connect, app, _ = await serve(head_s=0.03)
    app.hold.clear()
    reader, _ = await connect(GET + b"\r\n" + GET)
    await asyncio.sleep(0.1)
    app.hold.set()
    assert (await answer(reader))[0] == 200
    assert await closed(reader)


async def test_the_oldest_of_too_many_open_heads_gives_way(serve):
    connect, _, refused = await serve(open_heads=3)
    slow = []
    for _ in range(4):
        slow.append(await connect(GET))
        await asyncio.sleep(0.01)  # in this order
    status, head, body = await answer(slow[0][0])
    assert (status, body["error"]["code"], refused) == (503, "overloaded", {503: 1})
    assert "retry-after: 1" in head
    reader, _ = await connect(GET + b"\r\n")
    assert (await answer(reader))[0] == 200
    for reader, writer in slow[2:]:  # the next one gave way to the connection that was served
        writer.write(b"\r\n")
        assert (await answer(reader))[0] == 200


async def test_finished_and_lost_heads_do_not_count(serve):
    connect, _, refused = await serve(open_heads=2)
    for _ in range(5):
        reader, writer = await connect(GET + b"\r\n")
        assert (await answer(reader))[0] == 200
        _, writer = await connect(GET)
        await asyncio.sleep(0.01)
        writer.close()
        await asyncio.sleep(0.01)
    assert not refused


async def test_a_silent_or_slow_body_ends_in_time(serve):
    connect, app, _ = await serve(body_silence_s=0.1, body_s=0.3)
    head = POST + b"content-length: 1000\r\n\r\n"
    reader, _ = await connect(head)
    assert (await answer(reader))[0] == 408
    reader, writer = await connect(head)
    assert (await dripped(reader, writer, b" "))[0] == 408
    assert app.lost == 2


async def test_all_bodies_together_have_a_bound(serve):
    connect, _, refused = await serve(open_body_bytes=1_000_000)
    head = POST + b"content-length: 1000000\r\n\r\n"
    first, _ = await connect(head + b'"' + b"x" * 600_000)
    await asyncio.sleep(0.05)
    second, second_writer = await connect(head + b'"' + b"x" * 600_000)
    assert (await answer(first))[0] == 503  # whoever holds the memory, and not who comes next
    second_writer.write(b"x" * 399_998 + b'"')
    assert (await answer(second))[0] == 200  # and it has given its bytes back
    third, _ = await connect(head + b'"' + b"x" * 999_998 + b'"')
    assert (await answer(third))[0] == 200
    assert refused == {503: 1}


async def test_held_bodies_do_not_keep_others_out(serve):
    connect, app, refused = await serve(open_body_bytes=1_000_000)
    head = POST + b"content-length: 500000\r\n\r\n"
    held = []
    for _ in range(4):
        held.append(await connect(head + b"x" * 400_000))
        await asyncio.sleep(0.02)
    for _ in range(3):
        reader, _ = await connect(head + b'"' + b"x" * 499_998 + b'"')
        assert (await answer(reader))[0] == 200
    for reader, _ in held[:3]:  # there is room for the last one
        assert (await answer(reader))[0] == 503
    assert (app.lost, refused) == (3, {503: 3})


async def test_many_whole_requests_in_one_read_are_no_long_head(serve):
    connect, _, refused = await serve()
    request = GET + b"a: " + b"b" * 400 + b"\r\n\r\n"
    reader, writer = await connect(request * 600 + GET + b"a: " + b"b" * 60_000)  # one unfinished
    for _ in range(600):
        assert (await answer(reader))[0] == 200
    writer.write(b"\r\n\r\n")
    assert (await answer(reader))[0] == 200
    assert not refused


async def test_a_long_head_behind_whole_requests_is_refused(serve):
    connect, _, refused = await serve()
    reader, writer = await connect(GET + b"\r\n" + GET + b"a: " + b"b" * 200_000)
    assert (await answer(reader))[0] in (200, 431)
    assert await asyncio.wait_for(reader.read(), 10) is not None
    assert refused == {431: 1}
    writer.close()
