"""One request in every situation of the determinism guarantee, and the check of what occurred."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from services.common.text import Tokenizer
from services.engine.compute.loader import load_model
from services.engine.compute.model_runner import ModelRunner
from services.engine.contract.config import EngineConfig
from services.engine.contract.messages import AddRequest, CoreRequest
from services.engine.contract.runner import SequenceMetadata
from services.engine.contract.sampling_params import Constraint, SamplingParams
from services.engine.core.constraints import Constraints
from services.engine.core.engine_factory import build_engine
from services.engine.core.llm_engine import LLMEngine
from services.engine.grammar.structured_output import SOMatcherBuilder
from services.engine.grammar.wire import Setup
from services.engine.model_files import load_text_assets

BLOCK = 8
PROMPT = [(37 * i * i + 11 * i) % 251 for i in range(72)]
WARM = 32
"""Prompt tokens that an earlier request has left in the cache."""
RESUMED_AFTER = 24
"""Tokens that the first of two engines generates before the second resumes the answer."""
SHORTEST = 64
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, seed=3),
    "seeded": SamplingParams(temperature=1.0, top_p=0.95, seed=11),
}
CONSTRAINTS = ("plain", "json_schema")
NAMES = list(itertools.product(SAMPLING, CONSTRAINTS))


@dataclass(frozen=True)
class Cell:
    """What happens to the request."""

    batch: bool = False
    hit: bool = False
    chunked: bool = False
    preempted: bool = False
    continued: bool = False

    def __str__(self) -> str:
        return "+".join(name for name, on in vars(self).items() if on) or "nothing"

    def config(self, model: str, dtype: str = "float32") -> EngineConfig:
        """Blocks are scarce in the cells where other requests preempt this one."""
        return EngineConfig(
            model=model,
            threads=1,
            dtype=dtype,
            deterministic=True,
            block_size=BLOCK,
            num_blocks=32 if self.batch and self.preempted else 128,
            max_model_len=512,
            max_num_batched_tokens=13 if self.chunked else 512,
            # A preempted request of a cold cell computes all of it again.
            prefix_cache=self.hit,
        )


class WatchedRunner(ModelRunner):
    """Records the batch of each forward."""

    rounds: list[tuple[SequenceMetadata, ...]]

    def execute_main_model(self, step, batch, previous):
        if not hasattr(self, "rounds"):
            self.rounds = []
        self.rounds.append(tuple(batch))
        return super().execute_main_model(step, batch, previous)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    cached: int = 0


def word_schema(letters: int) -> Constraint:
    """An object with one word of so many lower-case letters, or a few more."""
    word = {"type": "string", "pattern": f"^[a-z]{{{letters},{letters + 4}}}$"}
    schema = {
        "type": "object",
        "properties": {"w": word},
        "required": ["w"],
        "additionalProperties": False,
    }
    return Constraint("json_schema", json.dumps(schema))


class SharedBuilder(SOMatcherBuilder):
    """Outlives the engines of a module: its process takes seconds to start."""

    def close(self) -> None:
        """Not with the engine."""

    def really_close(self) -> None:
        super().close()


class DeterminismCells:
    """Runs cells over one model.

    Args:
        letters: least length of the word in the requested object; it takes SHORTEST tokens.
        most: tokens of that object at most.
    """

    def __init__(self, model: str, letters: int, most: int, dtype: str = "float32") -> None:
        self._dtype = dtype
        self._word = word_schema(letters)
        self._most = most
        self.model = model
        self.tokenizer = Tokenizer(load_text_assets(model))
        self._source = load_model(model)
        config = self._source.config
        ends = list(self._source.eos_token_ids)
        self._builder = SharedBuilder(Setup(model, config.vocab_size, ends, 1 << 30))
        self._answers: dict[tuple[Cell, str, str], Answer] = {}

    def params(self, sampling: str, constraint: str) -> SamplingParams:
        own = SAMPLING[sampling]
        if constraint == "plain":
            return replace(own, max_tokens=SHORTEST, ignore_eos=True)
        return replace(own, max_tokens=self._most, constraint=self._word)

    def reference(self, sampling: str, constraint: str) -> Answer:
        """The answer to which nothing happens."""
        return self.straight(Cell(), sampling, constraint)

    def straight(self, cell: Cell, sampling: str, constraint: str) -> Answer:
        """The answer of one engine; the cell that is the same but continued begins with it."""
        name = (cell, sampling, constraint)
        if name not in self._answers:
            self._answers[name] = self._run(cell, self.params(sampling, constraint), [])
        return self._answers[name]

    def resumed(self, cell: Cell, sampling: str, constraint: str, begun: list[int]) -> Answer:
        """What a second engine adds."""
        return self._run(cell, self.params(sampling, constraint), begun)

    def _run(self, cell: Cell, params: SamplingParams, continued: list[int]) -> Answer:
        config = cell.config(self.model, self._dtype)
        made: list[WatchedRunner] = []

        def make() -> WatchedRunner:
            made.append(WatchedRunner(config, self._source))
            return made[0]

        engine = build_engine(config, make)
        engine._constraints = Constraints(lambda: self._builder)
        try:
            run = _Run(engine, cell)
            answer = run.answer(params, continued)
            # The chunk before a snapshot ends where the snapshot is taken.
            cut = cell.chunked or (cell.hit and made[0].describe().state is not None)
            _check(cell, run, made[0].rounds, answer, continued, cut=cut)
        finally:
            engine.close()
        return answer

    def close(self) -> None:
        self._builder.really_close()


class _Run:
    """One request of interest in one engine."""

    def __init__(self, engine: LLMEngine, cell: Cell) -> None:
        self.engine = engine
        self.cell = cell
        self.seq_id = -1
        self.preemptions = 0

    def answer(self, params: SamplingParams, continued: list[int]) -> Answer:
        if self.cell.hit:
            self._add("warm", PROMPT[:WARM], SamplingParams(seed=0, max_tokens=1))
            self._step_until(Answer(), lambda _: not self.engine.has_unfinished_requests())
        if self.cell.batch:
            for index in range(3):
                own = SamplingParams(seed=index, max_tokens=54, ignore_eos=True)
                self._add(f"other {index}", PROMPT[index : index + 10], own)
        self._add("it", PROMPT, params, continued)
        self.seq_id = max(seq.seq_id for seq in self.engine.scheduler.sequences())
        answer = Answer()
        if self.cell.preempted and not self.cell.batch:
            self._step_until(answer, lambda a: len(a.tokens) >= RESUMED_AFTER // 2)
            self._preempt()
        self._step_until(answer, lambda a: a.reason is not None)
        for key in ("other 0", "other 1", "other 2"):
            self.engine.abort_request(key)
        self._step_until(Answer(), lambda _: not self.engine.has_unfinished_requests())
        self.engine.check_integrity()
        assert self.engine.load().held_blocks == 0
        return answer

    def _add(self, key: str, prompt, params: SamplingParams, continued=()) -> None:
        self.engine.add_request(
            AddRequest(
                key,
                CoreRequest(
                    prompt_token_ids=list(prompt),
                    params=params,
                    continued=(tuple(continued),) if continued else (),
                    # When blocks are short it is preempted before the others.
                    priority=-1 if key == "it" else 0,
                ),
            )
        )

    def _step_until(self, answer: Answer, done: Callable[[Answer], bool]) -> None:
        for _ in range(3000):
            if done(answer):
                return
            result = self.engine.step()
            assert not result.failures
            for mark in result.marks:
                self.preemptions += mark.request_key == "it" and mark.preempted
            for output in result.outputs:
                if output.request_key == "it":
                    answer.tokens += output.token_ids
                    answer.reason = output.finish_reason
                    answer.cached = max(answer.cached, output.num_cached_tokens)
            if self.engine.is_stuck(result):
                self.engine.wait_for_grammar(0.05)
        raise AssertionError("not done after 3000 rounds")

    def _preempt(self) -> None:
        """Preempt the request as the scheduler would for another one, in cells without others."""
        scheduler, plan = self.engine.scheduler, self.engine.scheduler._schedule
        (seq,) = scheduler.sequences()

        def once(builder) -> None:
            scheduler._schedule = plan
            scheduler._preempt(seq, builder)
            plan(builder)

        scheduler._schedule = once


def _check(
    cell: Cell, run: _Run, rounds, answer: Answer, continued: list[int], *, cut: bool
) -> None:
    """The cell's features happened, and no others."""
    own = [(batch, m) for batch in rounds for m in batch if m.seq_id == run.seq_id]
    sizes = [len(batch) for batch, _ in own]
    assert max(sizes) > 1 if cell.batch else max(sizes) == 1
    first = own[0][1].start
    assert first == answer.cached
    assert 0 < first <= WARM if cell.hit else first == 0
    chunks = 1 + [m.sample for _, m in own].index(True)
    assert chunks > 1 if cut else chunks == 1
    starts = [m.start for _, m in own]
    again = sum(later <= earlier for earlier, later in itertools.pairwise(starts))
    assert again == run.preemptions
    assert again > 0 if cell.preempted else again == 0
    assert len(continued) > 0 if cell.continued else not continued
    computed = sum(m.seqlen_q for _, m in own[:chunks])
    assert first + computed == len(PROMPT) + len(continued)


def all_cells() -> list[Cell]:
    return [Cell(*flags) for flags in itertools.product((False, True), repeat=5)]


def covering_cells() -> set[tuple[Cell, str, str]]:
    """16 of the 128 cells in which any three of the seven choices meet in all eight ways.

    An orthogonal array of strength 3: four choices are free, and each other one is the sum modulo
    2 of a different three of these.
    """
    found = set()
    for a, b, c, d in itertools.product((False, True), repeat=4):
        cell = Cell(a, b, c, d, a ^ b ^ c)
        sampling = list(SAMPLING)[a ^ b ^ d]
        found.add((cell, sampling, CONSTRAINTS[a ^ c ^ d]))
    return found


def check_one_answer(cells: DeterminismCells, cell: Cell, sampling: str, constraint: str) -> None:
    want = cells.reference(sampling, constraint)
    assert len(want.tokens) >= SHORTEST
    got = cells.straight(replace(cell, continued=False), sampling, constraint)
    if cell.continued:
        begun = got.tokens[:RESUMED_AFTER]
        got = cells.resumed(cell, sampling, constraint, begun)
        got = replace(got, tokens=begun + got.tokens)
    assert (got.tokens, got.reason) == (want.tokens, want.reason)
