"""An engine of the harness in a process of its own: asked in JSON lines, answers in JSON lines.

A test holds a ``Remote``; this file is also the program that it starts. ``run`` and ``forget`` are
those of ``vllm_harness.Engine``. The engine is closed when its standard input ends.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Self

import vllm_harness
from vllm_harness import Answer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ANSWER_S_MAX = 240.0
"""How long a test waits for the process to start, or to answer."""

CLOSE_S_MAX = 60.0
"""How long it may take to close."""


class Remote:
    """An engine in another process, within a ``with`` block, started with so many ``threads``."""

    def __init__(
        self, model: Path | str, kv: dict[str, Any], *, threads: int = 1, **own: Any
    ) -> None:
        self._threads = threads
        self._config = {"model": str(model), "kv": kv, **own}

    def __enter__(self) -> Self:
        """Start the process; its engine may still be starting."""
        ours, theirs = os.pipe()
        self._pipe = os.fdopen(ours, "rb", buffering=0)
        command = [sys.executable, __file__, str(theirs), json.dumps(self._config)]
        env = {**os.environ, **vllm_harness.ENVIRONMENT, "OMP_NUM_THREADS": str(self._threads)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[theirs], env=env)
        os.close(theirs)
        self._rest = b""
        return self

    def __exit__(self, *_: object) -> None:
        """Let the engine close, which flushes its store; end it if it does not."""
        try:
            self._process.communicate(timeout=CLOSE_S_MAX)
        finally:
            self._process.kill()
            self._process.wait()
            self._pipe.close()

    def run(self, *prompts: Sequence[int], **how: Any) -> list[Answer]:
        """Answer prompts, all at once."""
        answers = self._ask(do="run", prompts=[list(tokens) for tokens in prompts], how=how)
        return [Answer(tuple(tokens), length, cached) for tokens, length, cached in answers]

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        self._ask(do="forget")

    def threads(self) -> int:
        """Return with how many threads the engine was started, as torch has it."""
        return int(self._ask(do="threads"))

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._pipe], [], [], ANSWER_S_MAX)
            data = os.read(self._pipe.fileno(), 1 << 16) if ready else b""
            if not data:
                self._process.kill()
                raise AssertionError(
                    "the engine's process ended or fell silent; its output is above"
                )
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)


def main(answers: int, config: dict[str, Any]) -> None:
    """Serve requests from standard input until it ends."""
    import torch

    threads = torch.get_num_threads()  # with which the model is loaded; vLLM may set another number
    with os.fdopen(answers, "w") as out, vllm_harness.engine(**config) as llm:
        for line in sys.stdin:
            request = json.loads(line)
            reply: Any = None
            if request["do"] == "run":
                done = llm.run(*request["prompts"], **request["how"])
                reply = [(one.tokens, one.prompt, one.cached) for one in done]
            elif request["do"] == "threads":
                reply = threads
            else:
                llm.forget()
            print(json.dumps(reply), file=out, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
