from services.common.text.byte_level import byte_assets
from services.engine.grammar.vocabulary import vocabulary_of


def test_marks_are_text_and_special_tokens_are_not():
    words = vocabulary_of(byte_assets(special=("<s>", "</s>"), added=("<tool_call>",)), 300)
    assert words[:256] == [bytes([b]) for b in range(256)]
    assert words[256:] == [b"", b"", b"<tool_call>"]
    assert len(vocabulary_of(byte_assets(), 100)) == 100
