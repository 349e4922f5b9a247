"""What kvtier is worth in vLLM: time to the first token, and what others pay for it.

A real engine, a real model on the CPU (SmolLM2-135M in float32), a throttled link. Stock vLLM with
the same settings is the recompute baseline.

* ``hybrid_gain_equal``: a prompt of 16 blocks and a suffix, over a link on which loading it takes
  as long as recomputing: the better of stock vLLM and loading alone, over both at once.
  ``hybrid_worst``: the better single way over both at once, where the link is four times as fast
  and where it has a fourth of that.
* ``saving_throughput``: a mixed load of new prompts with saving off over the same with saving on.
* ``itl_p99_ratio``: the 99th percentile of the times between the tokens of requests that decode
  beside a restore, over the same beside stock vLLM's prefill of that prompt.
* ``idle_load_rate``: the rate at which a cold prompt is loaded, over an unthrottled disk, by an
  engine that has nothing else to do, over that of as many bytes without an engine.
* ``hit_rate_vs_ideal``: conversations of several turns over one system prompt, the engine restarted
  half-way: blocks found over those an ideal cache would have. Times to the first token against
  vLLM's own cache alone, and LMCache's connector where it is installed.
* ``wrong_tokens`` and ``leaked_blocks`` count over all of it.

Engines are processes in the Python that has vLLM (``--python``; default: .venv-vllm). ``--quick``
has fewer conversations, and one link.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from _disk import file_system, need_free, work_folder
from _harness import Bench, parse
from _vllm_engines import Engines, Verdicts, chosen_python
from _vllm_idle import idle
from _vllm_load import saving, stutter
from _vllm_restore import restore
from _vllm_turns import conversations

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTS: Final = ("restore", "saving", "stutter", "idle", "turns")
NEEDED_BYTES: Final = 6 << 30


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that were asked for."""
    paths = {"dir": "where stores are: a folder on a disk (default: $TMPDIR or here)"}
    values = {"python": "the interpreter that has vLLM (default: .venv-vllm/bin/python)"}
    options = parse(__doc__.partition("\n")[0], PARTS, argv, paths, values)
    python = chosen_python(options.values["python"])
    bench = Bench("vllm_ttft", options)
    verdicts = Verdicts()
    with work_folder(options.paths["dir"], bench.console) as folder:
        bench.settings["file_system"] = file_system(folder)
        need_free(folder, NEEDED_BYTES)
        for part in PARTS:
            if not options.wants(part):
                continue
            place = folder / part
            place.mkdir(mode=0o700)
            with Engines(bench, python, place, verdicts) as engines:
                if part == "restore":
                    restore(bench, engines)
                elif part == "saving":
                    saving(bench, engines)
                elif part == "stutter":
                    stutter(bench, engines)
                elif part == "idle":
                    idle(bench, engines)
                else:
                    conversations(bench, engines, python)
            bench.settings["parts"] = [*bench.settings.get("parts", ()), part]
            bench.save()
    bench.add(*verdicts.ratios())
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
