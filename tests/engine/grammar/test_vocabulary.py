from services.common.text import Tokenizer
from services.common.text.byte_level import byte_assets
from services.engine.grammar.vocabulary import vocabulary_of


def test_marks_are_text_and_special_tokens_are_bytes_of_no_text():
    assets = byte_assets(special=("<s>", "</s>"), added=("<tool_call>",))
    words = vocabulary_of(Tokenizer(assets), 300)
    assert words[:256] == [bytes([b]) for b in range(256)]
    assert words[256:] == [b"\xff<s>", b"\xff</s>", b"<tool_call>"]
    assert len(vocabulary_of(Tokenizer(assets), 100)) == 100
