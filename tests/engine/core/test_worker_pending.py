"""Results that are still on their way when `execute_sample` returns."""

from services.engine.compute.simulated_runner import SimulatedModel, SimulatedRunner
from services.engine.contract.runner import SamplerOutput

MODEL = SimulatedModel(vocab_size=64, max_model_len=512, eos=63)


class Pending:
    """See PendingOutput."""

    def __init__(self, output: SamplerOutput, log: list[str]) -> None:
        self._output, self._log = output, log
        self.device_tokens = output

    def wait(self) -> SamplerOutput:
        self._log.append(f"wait {self._output.step}")
        return self._output


class LateRunner(SimulatedRunner):
    """Returns pending results; in round `nan` the first row is broken."""

    def __init__(self, nan: int = 0) -> None:
        super().__init__(4, MODEL)
        self.nan = nan
        self.log: list[str] = []

    def execute_main_model(self, step, batch, previous):
        self.log.append(f"forward {step}")
        known = None if previous is None else previous.device_tokens
        return super().execute_main_model(step, batch, known)

    def execute_sample(self, step, hidden, rows):
        output = super().execute_sample(step, hidden, rows)
        if step == self.nan:
            output = SamplerOutput(step, output.tokens, nan_rows=(0,))
        return Pending(output, self.log)

    def scrub(self) -> tuple[int, ...]:
        self.log.append("scrub")
        return ()


def test_blocks_are_cleaned_before_the_next_round(make_driver) -> None:
    runner = LateRunner(nan=2)
    driver = make_driver(MODEL, runner=lambda: runner)
    for key in "ab":
        driver.add(key, [1, 2, 3], max_tokens=6, ignore_eos=True)
    driver.run().check_all()
    assert list(driver.failures) == ["a"]
    assert runner.log.count("scrub") == 1
    # Round 3 is launched before the result of round 2 is read; round 4 comes after the cleaning.
    assert runner.log.index("scrub") < runner.log.index("forward 4")


def test_every_round_is_awaited_once_and_the_engine_gives_the_same_tokens(make_driver) -> None:
    runner = LateRunner()
    driver = make_driver(MODEL, runner=lambda: runner)
    for index in range(5):
        driver.add(f"r{index}", range(1, 20 + index), max_tokens=9, n=2)
    driver.run().check_all()
    forwards = [line.split()[1] for line in runner.log if line.startswith("forward")]
    waits = [line.split()[1] for line in runner.log if line.startswith("wait")]
    assert waits == forwards
