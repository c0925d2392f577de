"""The names of parsers, as configuration keys spell them."""

TOOL_PARSERS = ("auto", "none", "hermes", "llama3", "mistral", "deepseek_v3", "deepseek_v4")
REASONING_PARSERS = ("auto", "none", "think", "mistral")
