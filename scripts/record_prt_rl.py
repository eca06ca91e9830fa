"""Record what prt_rl's own collector returns, for the tests that compare Muster's compat layer with
it.

    python scripts/record_prt_rl.py [FILE]

with a Python that has prt_rl (0.6.3) installed; Muster's is not needed. The cases are in
tests/fakes/prt_rl_parts.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "parity" / "prt_rl_recorded.json"


def main(target: Path) -> None:
    sys.path.insert(0, str(ROOT))
    from prt_rl.common.collectors import Collector

    from tests.fakes.prt_rl_parts import CASES, run

    lines = [
        f"{json.dumps(case)}: {json.dumps(run(Collector, case), separators=(',', ':'))}"
        for case in CASES
    ]
    target.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    print(f"{len(lines)} cases in {target}, {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDED)
