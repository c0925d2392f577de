"""The grammar compiler's process: a grammar that takes too much memory ends this process only.

It reads and writes length-prefixed msgpack on stdin and stdout: first `Setup` in and `Ready` out,
then a `Job` in and an `Outcome` out, repeatedly. `services.engine.grammar.compiler` starts it.
"""

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from services.common.service.child_process import die_with_parent
from services.engine.grammar.library import load_library
from services.engine.grammar.schema_form import compiler_schema
from services.engine.grammar.schema_plan import LLGUIDANCE, plan_schema
from services.engine.grammar.schema_simplify import simplify
from services.engine.grammar.strict_engine import StrictCompiler
from services.engine.grammar.tag_format import compiler_tag
from services.engine.grammar.utf8 import breaking_tokens, broken_tokens, pending_tokens
from services.engine.grammar.vocabulary import model_tokenizer, vocabulary_of
from services.engine.grammar.wire import (
    MAX_WHITESPACE,
    TOO_COSTLY,
    Job,
    Outcome,
    Ready,
    Setup,
    read_frame,
    write_frame,
)

xgrammar = load_library()

# Lower priority than the engine's threads, so that a compilation does not slow running streams.
_NICE = 5
# The classes that xgrammar uses for characters of a string with a length and of one without.
_LOOSE = r"[^\"\\\r\n]"
_STRICT = r"[^\0-\x1f\"\\\r\n]"
# Prefixes of xgrammar's messages: "[12:00:00] /file.cc:1: ", "Check failed: (…) is false: ".
_PLACE = re.compile(r"^(\[[\d:]+\] \S+:\d+: )?(Check failed: .* is false: )?", re.MULTILINE)


def main() -> int:
    """Serve jobs until stdin closes."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal signals the whole group
    os.nice(_NICE)
    setup = read_frame(sys.stdin.buffer, Setup)
    if setup is None:
        return 0
    tokenizer = model_tokenizer(setup.model)
    words = vocabulary_of(tokenizer, setup.vocab_size)
    ready = Ready(words, broken_tokens(words), pending_tokens(words), breaking_tokens(words))
    info = tokenizer_info(setup, ready)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def tag_of(text: str) -> str:
        return compiler_tag(
            text,
            id_of=tokenizer.id_of,
            vocab_size=min(setup.vocab_size, tokenizer.vocab_size),
            end_ids=setup.eos_token_ids,
            json_format=_json_format,
        )

    strict = StrictCompiler(setup, ready)
    strict.load()
    _limit_memory(setup.memory_bytes)
    write_frame(sys.stdout.buffer, ready)
    while (job := read_frame(sys.stdin.buffer, Job)) is not None:
        write_frame(sys.stdout.buffer, _outcome(compiler, strict, tag_of, job))
    return 0


def tokenizer_info(setup: Setup, ready: Ready) -> Any:
    """A vocabulary for xgrammar; the compiler's process and the engine must use the same."""
    return xgrammar.TokenizerInfo(
        ready.vocabulary,
        xgrammar.VocabType.RAW,
        vocab_size=setup.vocab_size,
        stop_token_ids=setup.eos_token_ids,
    )


def _outcome(
    compiler: Any, strict: StrictCompiler, tag_of: Callable[[str], str], job: Job
) -> Outcome:
    try:
        if job.kind == "json_schema":
            plan = plan_schema(job.text)
            if plan.backend == LLGUIDANCE:
                grammar = strict.compile(plan.schema)
                return Outcome(job.number, grammar=grammar, backend=LLGUIDANCE)
            made = compile_schema(compiler, plan.schema)
            return Outcome(job.number, grammar=made.serialize_json())
        return Outcome(job.number, grammar=_compile(compiler, tag_of, job).serialize_json())
    except MemoryError:
        return _over_memory(job)
    except Exception as error:
        problem = _problem_of(error)
        if "bad_alloc" in problem:
            return _over_memory(job)
        return Outcome(job.number, problem=problem)


def _problem_of(error: Exception) -> str:
    """xgrammar's message in one line, without the position in its source."""
    text = str(error).strip() or type(error).__name__
    prefix_ends = [found.end() for found in _PLACE.finditer(text) if found.group()]
    problem = " ".join(text[prefix_ends[-1] :].split() if prefix_ends else text.splitlines()[-1:])
    if problem.endswith("but got"):  # the quoted line break or empty text was cut off
        problem += " the end of the line"
    return problem[:300]


def _over_memory(job: Job) -> Outcome:
    problem = "needs more memory to compile than the limit"
    return Outcome(job.number, problem=problem, reason=TOO_COSTLY)


def _compile(compiler: Any, tag_of: Callable[[str], str], job: Job) -> Any:
    match job.kind:
        case "json_object":
            return compile_schema(compiler, {"type": "object", "additionalProperties": True})
        case "regex":
            return compiler.compile_regex(job.text)
        case "ebnf":
            return compiler.compile_grammar(job.text)
        case "choice":
            literals = (json.dumps(text, ensure_ascii=False) for text in job.choices)
            return compiler.compile_grammar("root ::= " + " | ".join(literals))
        case "structural_tag":
            return compiler.compile_structural_tag(tag_of(job.text))
        case unknown:
            raise ValueError(f"unknown kind {unknown}")


def compile_schema(compiler: Any, schema: Any) -> Any:
    """Compile a schema that the check accepts, with xgrammar."""
    full = json.dumps(compiler_schema(schema))
    strict = strict_grammar(full, MAX_WHITESPACE)
    if strict is not None:
        return compiler.compile_grammar(strict)
    return compiler.compile_json_schema(full, max_whitespace_cnt=MAX_WHITESPACE)


def _json_format(schema: Any, blanks: int | None) -> dict[str, Any]:
    full = compiler_schema(simplify(schema).schema)
    cap = MAX_WHITESPACE if blanks is None else min(blanks, MAX_WHITESPACE)
    strict = strict_grammar(json.dumps(full), cap)
    if strict is not None:
        return {"type": "grammar", "grammar": strict}
    return {"type": "json_schema", "json_schema": full, "max_whitespace_cnt": cap}


def strict_grammar(schema: str, max_whitespace: int) -> str | None:
    """The grammar of a schema with bounded strings, changed to exclude raw control characters.

    Returns None if the schema has no bounded string.
    """
    grammar = str(xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=max_whitespace))
    return grammar.replace(_LOOSE, _STRICT) if _LOOSE in grammar else None


def _limit_memory(extra_bytes: int) -> None:
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + extra_bytes, used + extra_bytes))


if __name__ == "__main__":
    raise SystemExit(main())
