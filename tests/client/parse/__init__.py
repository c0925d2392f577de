"""Models and schemas as users of pydantic and zod write them, for the openai clients' `parse`."""
