"""The program of docs/save_and_continue.md, interrupted at random moments: it uses the data that
one run uses.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_code_blocks import blocks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forks after importing torch"),
]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "save_and_continue.md"
DRIVER = """
import hashlib, os, random, signal, sys, threading, traceback
from pathlib import Path
from muster import MultiSyncCollector

program = {"__name__": "program"}
exec(Path(sys.argv[1]).read_text(), program)
folder, kind, wanted, each = Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
program["torch"].set_num_threads(1)
update = program["update"]


def make_with_workers(policy):
    options = {"num_envs": 4, "frames_per_batch": 512, "total_frames": 512 * program["UPDATES"], "seed": 0}
    return MultiSyncCollector(["CartPole-v1"] * 2, policy, **options)


make = make_with_workers if kind == "workers" else program["make"]


# The program, which gets Ctrl-C so many seconds after the collector was made, or after its first update (0: never).
def run(place, seconds, when):
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))

    def begin(now):
        if seconds and now == when and timer.ident is None:
            timer.start()

    def noting(batch, policy, optimizer):
        update(batch, policy, optimizer)
        content = [batch[key].contiguous().numpy().tobytes() for key in ("observation", "action")]
        content += [weight.detach().numpy().tobytes() for weight in policy.parameters()]
        with open(place / "used", "a") as used:
            used.write(hashlib.sha256(b"".join(content)).hexdigest() + chr(10))
        begin("used")

    def making(policy):
        collector = make(policy)
        begin("made")
        return collector

    program["update"], program["make"] = noting, making
    place.mkdir(exist_ok=True)
    try:
        program["train"](place / "state")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = 0
    except SystemExit:
        code = 2  # saved
    except KeyboardInterrupt:
        code = 3  # before the loop or after it: nothing was collected, and nothing is saved
    if timer.ident is not None:
        timer.cancel()
        timer.join()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return code


def used(place):
    file = place / "used"
    return file.read_text().split() if file.exists() else []


# What a function returns in a process of its own.
def apart(function, *arguments):
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        failed = True
        try:
            os.write(writer, bytes(function(*arguments)))
            failed = False
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(failed)
    os.close(writer)
    with open(reader, "rb") as answer:
        found = list(answer.read())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return found


# Start the program again and again, and over when it was complete.
def interrupted(*times):
    codes = []
    for seconds, when in times:
        codes.append(run(parts, seconds, when))
        found = used(parts)
        assert found == expected[: len(found)], f"after {codes}: what was used is not what one run uses"
        if codes[-1] == 0:
            assert found == expected, f"after {codes}: something is missing"
        if codes[-1] == 0 or (codes[-1] == 3 and found == expected):
            (parts / "used").unlink()
            (parts / "state").unlink(missing_ok=True)
    return codes


whole, parts = folder / "whole", folder / "parts"
assert apart(lambda: [run(whole, 0, None)]) == [0]
expected = used(whole)
assert len(expected) == program["UPDATES"]
draws = random.Random(kind)
codes = []
while codes.count(2) < wanted:
    # the interrupt may come while the state is loaded; on a busy machine all of the first kind do
    times = [(draws.uniform(0.001, 0.25), draws.choice(["made", "used"])) for _ in range(each)]
    codes += apart(interrupted, *times)
print(codes)
"""


@pytest.mark.parametrize(
    ("kind", "each"),
    [
        ("here", 1),
        # a process with workers starts a fork server, which imports torch
        ("workers", 10),
    ],
)
@pytest.mark.timeout(900)
def test_the_data_and_weights_of_interrupted_programs_are_those_of_one_run(
    kind, each, tmp_path
):
    code = next(block.code for block in blocks(PAGE) if "def train" in block.code)
    (tmp_path / "program.py").write_text(code)
    command = [
        sys.executable,
        "-c",
        DRIVER,
        str(tmp_path / "program.py"),
        str(tmp_path),
        kind,
        "20",
        str(each),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
