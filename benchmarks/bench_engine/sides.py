"""The sides of a comparison as the main process sees them: start, measure a case, memory, end."""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class SideFailedError(RuntimeError):
    """A peer that cannot be run; the message ends with the last lines that it wrote."""


@dataclass(frozen=True)
class Case:
    """What every side does once a round."""

    case: str
    """"prefill" or "decode"."""
    batch: int
    prompt: int
    steps: int

    @property
    def name(self) -> str:
        return "prefill" if self.case == "prefill" else f"decode B={self.batch}"


class Side(Protocol):
    """One engine in one number format."""

    name: str
    versions: dict[str, str]
    memory: dict[str, int]
    """Bytes: `rss` at the last reading, and `peak`."""

    def measure(self, case: Case, seed: int) -> float:
        """Tokens per second of the case, once."""

    def close(self) -> None:
        """End its process."""


@dataclass
class ProcessSide:
    """A process that implements the protocol."""

    name: str
    command: list[str]
    threads: int
    folder: Path = ROOT
    versions: dict[str, str] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            self.command,
            cwd=self.folder,
            env=os.environ | {"OMP_NUM_THREADS": str(self.threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self.versions = self._read()["ready"]
        except BaseException:
            self.close()
            raise

    def measure(self, case: Case, seed: int) -> float:
        assert self._process.stdin is not None
        request = {
            "case": case.case,
            "batch": case.batch,
            "prompt": case.prompt,
            "steps": case.steps,
            "seed": seed,
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        found = self._read()
        return found["tokens"] / found["seconds"]

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _read(self) -> dict:
        assert self._process.stdout is not None
        # A library may talk on stdout before the side has it for itself.
        while (line := self._process.stdout.readline()) and not line.startswith("{"):
            continue
        if not line:
            self._process.wait()
            self._log.seek(0)
            tail = "\n  ".join(self._log.read().splitlines()[-8:])
            raise SideFailedError(f"{self.name} ended with {self._process.returncode}:\n  {tail}")
        found = json.loads(line)
        self.memory = {key: found[key] for key in ("rss", "peak")}
        return found


class LlamaCppSide:
    """llama.cpp's own benchmark programs, one run a case."""

    def __init__(self, build: Path, model: Path, dtype: str, threads: int) -> None:
        self.name = f"llama.cpp {dtype}"
        self.memory = {}
        self._bench = build / "bin" / "llama-batched-bench"
        self._model = model
        self._threads = threads
        self.versions = {"llama.cpp": _build_number(build)}

    def measure(self, case: Case, seed: int) -> float:
        steps = 1 if case.case == "prefill" else case.steps
        sizes = {
            "-m": self._model,
            "-c": case.batch * (case.prompt + steps),
            "-b": 4096,
            "-ub": 512,
            "-t": self._threads,
            "-tb": self._threads,
            "-npp": case.prompt,
            "-ntg": steps,
            "-npl": case.batch,
            "--output-format": "jsonl",
        }
        command = [str(self._bench), *(str(part) for pair in sizes.items() for part in pair)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        rows = re.findall(r'^.*(\{"n_kv_max".*\}).*$', done.stdout + done.stderr, re.MULTILINE)
        if done.returncode or not rows:
            tail = "\n  ".join(done.stderr.splitlines()[-8:])
            raise SideFailedError(f"{self.name} ended with {done.returncode}:\n  {tail}")
        return json.loads(rows[-1])["speed_pp" if case.case == "prefill" else "speed_tg"]

    def close(self) -> None:
        """Nothing runs between cases."""


def llama_models(build: Path, gguf: Path, folder: Path) -> dict[str, Path]:
    """The file as it is (Q4_1), and its weights in BF16 and F32, made once by llama-quantize."""
    return {"Q4_1": gguf} | {
        dtype: _converted(build, gguf, folder, dtype) for dtype in ("BF16", "F32")
    }


def llama_formats(build: Path, gguf: Path, folder: Path) -> dict[str, Path]:
    """The file as it is (BF16), and its weights in Q8_0 and Q4_1, made once by llama-quantize."""
    return {"BF16": gguf} | {
        dtype: _converted(build, gguf, folder, dtype) for dtype in ("Q8_0", "Q4_1")
    }


def _converted(build: Path, gguf: Path, folder: Path, dtype: str) -> Path:
    target = folder / f"{gguf.stem.removesuffix('.Q4_1').removesuffix('.BF16')}.{dtype}.gguf"
    if not target.exists():
        partial = target.with_suffix(".partial")
        command = [build / "bin" / "llama-quantize", "--allow-requantize", gguf, partial, dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SideFailedError(f"llama-quantize to {dtype}: {done.stderr[-400:]}")
        partial.rename(target)
    return target


def python_side(name: str, module: str, threads: int, *arguments: object) -> ProcessSide:
    """A side that runs in this project's Python."""
    command = [sys.executable, "-m", f"benchmarks.bench_engine.{module}"]
    return ProcessSide(name, command + [str(part) for part in arguments], threads)


def _build_number(build: Path) -> str:
    command = [build / "bin" / "llama-batched-bench", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"version:? *(.+)", done.stdout + done.stderr)
    return found.group(1).strip() if found else "unknown"
