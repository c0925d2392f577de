"""Bodies as clients send them: compressed, with a byte-order mark, over HTTP/1.0."""

import asyncio
import gzip
import hashlib
import json
import random
import zlib

import httpx
import pytest

from services.common.errors import InvalidArgumentError
from services.common.rpc import MAX_RECEIVE_BYTES
from services.gateway.openai import body as bodies
from services.gateway.openai.body import LARGE_BYTES, SentBody, decode
from services.gateway.openai.json_size import MAX_COMMAS, MAX_CONTAINERS

MODEL = "tiny"
BODY = json.dumps({"model": MODEL, "prompt": "ab", "max_tokens": 2}).encode()
PATH = "/v1/completions"


def raw_deflate(data: bytes) -> bytes:
    squeeze = zlib.compressobj(wbits=-15)
    return squeeze.compress(data) + squeeze.flush()


async def post(http, content, encoding, **headers):
    return await http.post(PATH, content=content, headers={"Content-Encoding": encoding, **headers})


class TestContentEncoding:
    @pytest.mark.parametrize(
        ("encoding", "squeeze"),
        [
            ("gzip", gzip.compress),
            ("GZIP", gzip.compress),
            ("x-gzip", gzip.compress),
            ("deflate", zlib.compress),
            ("deflate", raw_deflate),
            ("identity", bytes),
            ("", bytes),
            ("gzip, identity", gzip.compress),
            ("gzip", lambda data: gzip.compress(data[:20]) + gzip.compress(data[20:])),
        ],
    )
    async def test_the_body_is_read(self, http, engine, encoding, squeeze):
        response = await post(http, squeeze(BODY), encoding)
        assert response.status_code == 200, response.text
        assert engine.requests[0].request.stop.max_tokens == 2

    async def test_a_large_body_is_inflated_whole(self, http, engine):
        noise = "".join(random.Random(0).choices(" \n\t\r", k=200_000)).encode()
        squeezed = gzip.compress(noise + BODY + noise)
        assert len(squeezed) > 80_000  # arrives in several pieces
        response = await post(http, squeezed, "gzip")
        assert response.status_code == 200, response.text
        assert engine.requests[0].request.stop.max_tokens == 2

    @pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, br", "gzip, gzip"])
    async def test_another_encoding_is_a_415_that_names_it(self, http, encoding):
        response = await post(http, BODY, encoding)
        error = response.json()["error"]
        assert response.status_code == 415
        assert (error["param"], error["code"]) == ("Content-Encoding", "unsupported_encoding")
        assert repr(encoding) in error["message"]
        assert response.headers["accept-encoding"] == "gzip, deflate"

    @pytest.mark.parametrize(
        "content",
        [BODY, gzip.compress(BODY)[:-9], gzip.compress(BODY) + b"more", b"", b"\x1f\x8b"],
        ids=["plain", "cut", "longer", "empty", "head"],
    )
    @pytest.mark.parametrize("encoding", ["gzip", "deflate"])
    async def test_damaged_data_is_a_400_that_names_the_encoding(self, http, content, encoding):
        response = await post(http, content, encoding)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("Content-Encoding", "invalid_encoding")
        assert encoding in error["message"]

    async def test_the_inflated_body_has_the_bound_of_any_body(self, http, engine):
        bomb = gzip.compress(b" " * (MAX_RECEIVE_BYTES + 1 - len(BODY)) + BODY)
        assert len(bomb) < 100_000
        response = await post(http, bomb, "gzip")
        assert response.status_code == 413
        assert "16777216" in response.json()["error"]["message"]
        members = gzip.compress(b" " * 1_000_000) * 100
        assert (await post(http, members, "gzip")).status_code == 413
        most = gzip.compress(b" " * (MAX_RECEIVE_BYTES - len(BODY)) + BODY)
        assert (await post(http, most, "gzip")).status_code == 200

    async def test_the_number_of_members_is_bounded(self, http):
        """Each empty member costs a copy of all that follow it."""
        members = gzip.compress(b"")
        response = await post(http, gzip.compress(BODY) + members * 63, "gzip")
        assert response.status_code == 200, response.text
        response = await post(http, members * (MAX_RECEIVE_BYTES // len(members)), "gzip")
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "invalid_encoding")
        assert "64 members" in error["message"]

    async def test_nothing_is_inflated_or_decoded_without_a_key(
        self, start_gateway, tmp_path, monkeypatch
    ):
        keys = tmp_path / "keys"
        keys.write_text(f"acme sha256:{hashlib.sha256(b'k1').hexdigest()}\n")
        gateway = await start_gateway(api_keys_file=str(keys))
        worked = []
        monkeypatch.setattr(bodies, "inflate", lambda *_: worked.append("inflate") or BODY)
        monkeypatch.setattr(bodies, "_decode", lambda _: worked.append("decode") or {})
        async with httpx.AsyncClient(base_url=f"http://{gateway.http}") as http:
            for encoding in ("gzip", "identity"):
                response = await post(http, b"x" * 1000, encoding)
                assert response.status_code == 401
                assert not worked
            key = {"Authorization": "Bearer k1"}
            assert (await post(http, b"x", "gzip", **key)).status_code == 400
        assert worked == ["inflate", "decode"]

    async def test_a_refusal_without_100_continue_closes_the_connection(self, gateway):
        """Else the next request would be read as the body that never came."""
        expects = "Expect: 100-continue\r\nContent-Encoding: br\r\n"
        head, _ = await exchange(gateway.http, request_of("1.1", BODY, expects)[: -len(BODY)])
        assert " 415 " in head
        assert "connection: close" in head

    async def test_two_headers_are_two_encodings(self, http):
        both = [("Content-Encoding", "br"), ("Content-Encoding", "gzip")]
        response = await http.post(PATH, content=gzip.compress(BODY), headers=both)
        assert response.status_code == 415
        assert "'br, gzip'" in response.json()["error"]["message"]


class TestManyValues:
    """The decoder holds the event loop for as long as it makes values."""

    @pytest.mark.parametrize(
        ("item", "what"),
        [(b"[]", "arrays and objects"), (b"{}", "arrays and objects"), (b"1", "commas")],
    )
    async def test_are_refused(self, http, item, what):
        most = MAX_CONTAINERS if b"1" not in item else MAX_COMMAS
        values = b"[" + b",".join([item] * (most + 2)) + b"]"
        body = BODY[:-1] + b', "metadata": ' + values + b"}"
        for content, encoding in ((body, "identity"), (gzip.compress(body), "gzip")):
            response = await post(http, content, encoding)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "too_many_values")
            assert f"{most} {what}" in error["message"]

    async def test_within_a_text_are_none(self):
        text = "[{,\\" * 1_400_000 + '"[' * 200_000
        raw = json.dumps({"prompt": text}).encode()
        assert await decode(SentBody(raw, None)) == {"prompt": text}

    @pytest.mark.parametrize("raw", [b'"["' * 200_000, b'["' + b"[" * 400_000, b"\\" * 400_000])
    async def test_damaged_json_is_named_as_such(self, raw):
        with pytest.raises(InvalidArgumentError) as caught:
            await decode(SentBody(raw, None))
        assert caught.value.reason == "INVALID_JSON"

    def test_a_small_body_cannot_have_too_many(self):
        assert 2 * MAX_CONTAINERS >= LARGE_BYTES


class TestByteOrderMark:
    async def test_before_the_json_it_is_taken(self, http):
        response = await http.post(PATH, content=b"\xef\xbb\xbf" + BODY)
        assert response.status_code == 200, response.text

    async def test_of_another_encoding_is_named(self, http):
        response = await http.post(PATH, content=BODY.decode().encode("utf-16"))
        assert response.status_code == 400
        assert "UTF-16" in response.json()["error"]["message"]


async def exchange(address: str, request: bytes) -> tuple[str, bytes]:
    """Head and body of the answer, up to the end of the connection."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.decode().lower(), body


def request_of(version: str, body: bytes, more: str = "") -> bytes:
    head = f"POST {PATH} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


class TestOldClients:
    async def test_a_stream_ends_with_the_connection(self, gateway):
        body = json.dumps({"model": MODEL, "prompt": "ab", "stream": True}).encode()
        head, answer = await exchange(gateway.http, request_of("1.0", body))
        assert " 200 " in head
        assert "transfer-encoding" not in head
        assert "connection: close" in head
        assert answer.startswith(b"data: {")
        assert answer.endswith(b"data: [DONE]\n\n")
        lines = [line for line in answer.split(b"\n") if line]
        assert all(line.startswith(b"data: ") for line in lines)

    async def test_a_whole_answer_has_its_length(self, gateway):
        head, answer = await exchange(gateway.http, request_of("1.0", BODY))
        assert f"content-length: {len(answer)}" in head
        assert json.loads(answer)["object"] == "text_completion"

    async def test_newer_clients_get_chunks(self, gateway):
        body = json.dumps({"model": MODEL, "prompt": "ab", "stream": True}).encode()
        closing = request_of("1.1", body, "Connection: close\r\n")
        head, answer = await exchange(gateway.http, closing)
        assert "transfer-encoding: chunked" in head
        assert answer.endswith(b"0\r\n\r\n")
