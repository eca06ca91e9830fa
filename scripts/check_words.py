"""Check that words which make readers stumble occur neither in the source nor in the documents.

    python scripts/check_words.py

Processes, rows and environments are not persons, and a sentence names what it is about.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("src/**/*.py", "examples/**/*.py", "docs/**/*.md", "*.md")
INSTEAD = {
    "nobody": "name what is missing: 'no worker', 'not delivered'",
    "somebody": "name the process, thread or user",
    "anybody": "'every process', 'any user'",
    "whoever": "name the process, thread or environment",
    "anew": "'again', 'restart', 'reset'",
    "mend": "'fix', 'repair'",
    "to be had": "'available'",
    "what is asked for": "'the request', 'the number of ...'",
}


def main() -> int:
    """Print every place; the number of them is the exit code, at most 1."""
    unwanted = re.compile(rf"\b({'|'.join(INSTEAD)})(?:s|ed|ing)?\b", re.IGNORECASE)
    found = 0
    for path in sorted(path for place in PLACES for path in ROOT.glob(place)):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for match in unwanted.finditer(line):
                print(
                    f"{path.relative_to(ROOT)}:{number}: {match[0]!r}: write {INSTEAD[match[1].lower()]}"
                )
                found += 1
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
