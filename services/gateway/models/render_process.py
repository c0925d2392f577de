"""The gateway's side of the processes that render chats: one chat each, killed when it is late."""

import asyncio
import contextlib
import logging
import struct
import sys
from typing import NoReturn

import msgspec

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import InvalidArgumentError, UnavailableError
from services.common.text import ChatTemplate, RenderedChat
from services.common.text.control_tokens import ControlTokens
from services.gateway.models.render_main import MAX_ANSWER_BYTES, Job, Outcome, from_bytes

log = logging.getLogger(__name__)

START_S = 60.0
Process = asyncio.subprocess.Process


class RenderProcesses:
    """Starts processes when they are needed, and keeps them.

    Args:
        most: processes at the same time; further chats wait.
        timeout_s: of one chat, once its process is ready.
    """

    def __init__(self, most: int, *, timeout_s: float) -> None:
        self._turns = asyncio.Semaphore(most)
        self._timeout_s = timeout_s
        self._idle: list[Process] = []
        self._busy: set[Process] = set()
        self._ending: set[asyncio.Task[int]] = set()

    async def render(
        self, template: ChatTemplate, control: ControlTokens, chat: inference_pb2.Chat
    ) -> RenderedChat:
        """Render a chat; a caller that is cancelled ends its process.

        Raises:
            InvalidArgumentError: the template refuses the chat, or exceeds a limit.
            UnavailableError: no process could be started.
        """
        async with self._turns:
            process = self._take_idle() or await self._start()
            self._busy.add(process)
            done = False
            try:
                async with asyncio.timeout(self._timeout_s):
                    outcome = await _exchange(process, template, control, chat)
                done = True
            except TimeoutError:
                _refuse_costly(f"takes longer than {self._timeout_s:g} s with it")
            except (OSError, EOFError, ValueError):
                _refuse_costly("ends its process with it, e.g. because it needs too much memory")
            finally:
                self._busy.discard(process)
                if done:
                    self._idle.append(process)
                else:
                    self._end(process)
        if outcome.problem:
            raise InvalidArgumentError.for_field(
                outcome.field, outcome.problem, reason="CHAT_TEMPLATE"
            )
        marked = None if outcome.marked is None else from_bytes(outcome.marked)
        return RenderedChat(from_bytes(outcome.text), marked)

    async def close(self) -> None:
        """Kill all processes; idempotent."""
        processes = [*self._idle, *self._busy]
        self._idle.clear()
        for process in processes:
            self._end(process)
        if self._ending:
            await asyncio.wait(self._ending)

    def _take_idle(self) -> Process | None:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            self._end(process)  # somebody has killed it: this chat is not the reason
        return None

    def _end(self, process: Process) -> None:
        """Kill a process; `close` waits until all have ended."""
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        ending = asyncio.ensure_future(process.wait())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.gateway.models.render_main"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(START_S):
                await _read_frame(process)
        except (TimeoutError, OSError, EOFError) as error:
            self._end(process)
            log.warning("a process that renders chats did not start: %s", type(error).__name__)
            raise UnavailableError(
                "the model's chat template cannot be rendered now: its process did not start",
                reason="RENDERER_UNAVAILABLE",
                retry_after_s=1,
            ) from error
        except BaseException:
            self._end(process)
            raise
        return process


def _refuse_costly(problem: str) -> NoReturn:
    raise InvalidArgumentError.for_field(
        "chat", f"the model's chat template {problem}", reason="CHAT_TEMPLATE"
    )


async def _exchange(
    process: Process, template: ChatTemplate, control: ControlTokens, chat: inference_pb2.Chat
) -> Outcome:
    assert process.stdin is not None, "made with pipes"
    tokens = tuple(sorted(template.special_tokens.items()))
    job = Job(
        template.source, tokens, control.items, control.in_normalized, chat.SerializeToString()
    )
    frame = msgspec.msgpack.encode(job)
    process.stdin.write(struct.pack("<I", len(frame)) + frame)
    await process.stdin.drain()
    return msgspec.msgpack.decode(await _read_frame(process), type=Outcome)


async def _read_frame(process: Process) -> bytes:
    assert process.stdout is not None, "made with pipes"
    (length,) = struct.unpack("<I", await process.stdout.readexactly(4))
    if length > MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of {length} bytes")
    return await process.stdout.readexactly(length)
