"""Time `clairvit --help` next to an interpreter that does nothing.

python benchmarks/help.py --rounds 9
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "clairvit --help": [sys.executable, "-m", "clairvit", "--help"],
}


def seconds(command: list[str]) -> float:
    """Return the wall-clock time of one run of a command."""
    started = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - started


def main() -> None:
    """Print the median time of each command, and the ratio of the two within each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    measured = [{name: seconds(command) for name, command in COMMANDS.items()} for _ in range(rounds)]
    for name in COMMANDS:
        print(f"{name:18} {statistics.median(round_times[name] for round_times in measured):6.3f} s")
    ratio = statistics.median(
        round_times["clairvit --help"] / round_times["python -c pass"] for round_times in measured
    )
    print(f"{'ratio':18} {ratio:6.1f}")


if __name__ == "__main__":
    main()
