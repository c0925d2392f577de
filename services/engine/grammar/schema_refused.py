"""The refusal of a schema, by the path of its keyword."""


class SchemaRefusedError(ValueError):
    """A keyword cannot be enforced, or no value satisfies the schema.

    Attributes:
        path: JSON pointer of the keyword.
        problem: what is wrong with it.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path or '/'}: {problem}")
        self.path = path
        self.problem = problem
