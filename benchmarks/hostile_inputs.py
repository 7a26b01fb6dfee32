"""Thousands of hostile files and options, generated: each must be read as it stands, or refused in one line.

    python benchmarks/hostile_inputs.py --examples 1000

What is generated, and what each must meet with, is in tests/hostile.py; tests/test_properties.py tries a few of the
same at every run of the tests. Prints a table in Markdown, and of each class what did not hold.
"""

import argparse
import collections
import logging
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.hostile import CLASSES

from hypothesis import HealthCheck, Phase, given, seed, settings


def try_class(name, examples, first_seed):
    """How many of that many generated inputs were accepted, refused, or did not hold, and [(why, input)] of the last.

    Hypothesis generates fewer where there are no more.
    """
    strategy, attempt = CLASSES[name]
    counts = collections.Counter()
    faults = []

    @seed(first_seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy())
    def try_all(example):
        try:
            counts[attempt(example)] += 1
        except Exception as error:  # counted, and not searched for a smaller one
            counts["not held"] += 1
            faults.append((traceback.format_exception_only(error)[-1].strip(), example))

    try_all()
    return counts, faults


def row(name, counts):
    """A row of the table."""
    numbers = [counts.total(), counts["refused"], counts["accepted"], counts["not held"]]
    return f"| {name} | " + " | ".join(f"{number:,}" for number in numbers) + " |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000, help="of each class")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # PIL's and torch's, of what they go on to refuse
    logging.disable()
    os.environ["LOCAL_RANK"] = "1"  # a rank that prints no lines of its own
    began = time.perf_counter()
    total = collections.Counter()
    print("| class | tried | refused in one line | accepted | not held |\n| --- | --- | --- | --- | --- |")
    for name in CLASSES:
        counts, faults = try_class(name, args.examples, args.seed)
        total += counts
        print(row(name, counts), flush=True)
        for why, example in faults[:5]:
            print(f"{name}: {why:.300}\n    {example!r:.300}", file=sys.stderr)
    print(row("all", total))
    print(f"\n{time.perf_counter() - began:.0f} s", file=sys.stderr)
    sys.exit(total["not held"] > 0)
