"""Renders chats with limits of time and size, whatever the model's template does.

Most templates are bounded (services.common.text.template_check): a short chat is rendered at once
and a long one in a thread, both within limits. Any other template, and what exceeds these limits,
is rendered by a process that can be killed.
"""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from inferfleet_proto.v1 import inference_pb2
from services.common.text import ChatTemplate, RenderedChat, render_prompt
from services.common.text.bounded_template import TemplateTooCostlyError, limited
from services.common.text.chat_template import Template
from services.common.text.control_tokens import ControlTokens
from services.gateway.models.render_process import RenderProcesses

# Shorter chats are rendered faster than a thread wakes up.
INLINE_CHARS = 2048
INLINE_S = 0.05
THREAD_S = 1.0
# A longer one is rendered by a process: one operation on it may take long.
THREAD_CHARS = 512 * 1024
# A text that a template makes: this, and so many times what it got.
BASE_CHARS, CHARS_PER_CHAR = 256 * 1024, 8


class Renderer:
    """Owned by the gateway's loop.

    Args:
        timeout_s: time limit of one chat.
        processes: how many chats are rendered by processes at the same time.
    """

    def __init__(self, *, timeout_s: float, processes: int) -> None:
        self._processes = RenderProcesses(processes, timeout_s=timeout_s)

    async def close(self) -> None:
        """End the processes; idempotent."""
        await self._processes.close()

    async def render(
        self, template: Template, control: ControlTokens, chat: inference_pb2.Chat, pool: Executor
    ) -> RenderedChat:
        """Render a chat.

        Args:
            control: of the model's tokenizer.
            pool: threads for long chats.

        Raises:
            InvalidArgumentError: the template refuses the chat, or exceeds a limit with it.
            UnavailableError: no process could be started.
        """
        size = chat.ByteSize()
        if not isinstance(template, ChatTemplate):  # a library, not a template of a model's file
            where = pool if size > INLINE_CHARS else None
            return await _in(where, render_prompt, template, control, chat)
        if template.bounded and size <= THREAD_CHARS:
            short = size <= INLINE_CHARS
            seconds, most = INLINE_S if short else THREAD_S, BASE_CHARS + CHARS_PER_CHAR * size
            where = None if short else pool
            with contextlib.suppress(TemplateTooCostlyError):  # the process may take longer
                return await _in(where, _render_limited, template, control, chat, seconds, most)
        return await self._processes.render(template, control, chat)


def _render_limited(
    template: ChatTemplate,
    control: ControlTokens,
    chat: inference_pb2.Chat,
    seconds: float,
    max_chars: int,
) -> RenderedChat:
    with limited(seconds, max_chars):
        return render_prompt(template, control, chat)


async def _in(
    pool: Executor | None, work: Callable[..., RenderedChat], *arguments: Any
) -> RenderedChat:
    """Run `work` in a thread; None: here."""
    if pool is None:
        return work(*arguments)
    return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)
