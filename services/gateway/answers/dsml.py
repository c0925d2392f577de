"""DeepSeek V4 and V4.1: calls in DSML, parsed by DeepSeek's own library."""

import json
from typing import Any

from services.common.text.deepseek_recipe import recipe
from services.gateway.answers.events import CallArguments, CallBegun, Event, Text, joined


class DsmlParser:
    """See events.Parser."""

    def __init__(self) -> None:
        library = recipe()
        conversation = library.Conversation([library.UserMessage("")], thinking_mode=False)
        request = library.ConversationRequest(conversation, library.ModelVersion.DeepseekV41Flash)
        generator = library.ChatCompletionRequest.chunk_generator(request, "", "")
        self._library = library
        self._processor = library.StreamProcessor(generator, library.ParsingOptions())
        self._read_chunks(self._processor.push(library.InferenceChunk.ready()))

    def feed(self, text: str) -> list[Event]:
        """See Parser."""
        return self._read_chunks(self._processor.push(self._library.InferenceChunk.text(text)))

    def finish(self, *, cut: bool = False) -> list[Event]:
        """See Parser. The library decides what a mark is."""
        del cut
        stop = self._library.InferenceFinishReason.Stop
        chunks = self._processor.push(self._library.InferenceChunk.finish(stop))
        return self._read_chunks([*chunks, *self._processor.finish()])

    def _read_chunks(self, chunks: list[Any]) -> list[Event]:
        choices = [choice for chunk in chunks for choice in json.loads(chunk.to_json())["choices"]]
        events: list[Event] = []
        for choice in choices:
            delta = choice["delta"]
            events.append(Text(delta.get("content") or ""))
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                if function.get("name"):
                    events.append(CallBegun(function["name"]))
                events.append(CallArguments(function.get("arguments") or ""))
        return joined(events)
