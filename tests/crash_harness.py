"""Crash the SSD tier's course of operations at every step, in every way, with many seeds.

python tests/crash_harness.py --seeds 10 --json -
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter
from typing import TYPE_CHECKING

from crash.course import Course
from crash.events import DISKS, events
from crash.nodes import SURVIVALS

if TYPE_CHECKING:
    from collections.abc import Sequence

PROBLEMS_MAX = 20
"""Problems that are reported; the first ones say enough."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the course; exit status 1 if a crash lost or falsified anything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", default="-", help="a file for the result, - for stdout")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)  # every recovery reports what it repairs
    counts: Counter[str] = Counter()
    problems: list[str] = []
    for seed in range(options.seeds):
        for disk in DISKS.values():
            course = Course(disk)
            course.crash_at_points(list(SURVIVALS), seed, kinds=len(SURVIVALS))
            for event in events():
                event(course)
            counts["crashes"] += course.crashes
            counts += course.fs.points.counts
            problems += course.problems
    counts["problems in all"] = len(problems)
    result = json.dumps({**counts, "problems": problems[:PROBLEMS_MAX]}, indent=1)
    if options.json == "-":
        sys.stdout.write(result + "\n")
    else:
        with open(options.json, "w") as file:
            file.write(result + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
