#!/bin/sh
# All that needs a CUDA device, in at most eight minutes once packages are installed: the tests of recorded rollouts,
# the benchmark of collecting, PPO until CartPole is solved, and the other tests on a device. `make device` runs it.
#
#   scripts/on_device.sh [FOLDER]      FOLDER (default benchmarks/results) gets on_device.json, ppo_on_device.json,
#                                      and on_device/: a log of each part, and summary.txt
#   PYTHON=...                         an interpreter; its torch is used if that sees the device
#   WHEELS=...                         a folder with wheels, for a machine without a network
#
# Packages that are missing are installed into .venv-device, beside those of the interpreter. Without a torch that sees
# the device, PyPI's is installed, which is built for CUDA. Each part has a limit, and is run whatever became of the
# others; the most important ones are first. The status is 1 if a part failed.
set -u
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python3}
FOLDER=${1:-benchmarks/results}
LOGS=$FOLDER/on_device
VENV=.venv-device
SUMMARY=$LOGS/summary.txt
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$LOGS" || exit 1
: >"$SUMMARY"

say() {
    echo "$*" | tee -a "$SUMMARY"
}

# Not only torch knows: packages are not installed where there is nothing to measure.
has_device() {
    nvidia-smi -L >/dev/null 2>&1 || [ -e /dev/nvidiactl ] || [ -e /dev/dxg ]
}

sees_device() {
    "$1" -c 'import torch; torch.zeros(1, device="cuda").item()' >/dev/null 2>&1
}

# What Muster, the benchmarks and these tests import.
NEEDED="cloudpickle gymnasium hypothesis numpy pytest pytest_timeout rich safetensors tensordict torchrl tyro xdist"

lacks() {
    "$1" -c '
import sys
from importlib.util import find_spec
sys.exit(all(find_spec(name) for name in sys.argv[1:]))' $NEEDED
}

# install PYTHON PACKAGE...
install() {
    installer=$1
    shift
    "$installer" -m pip --disable-pip-version-check install ${WHEELS:+--no-index --find-links "$WHEELS"} "$@" \
        >>"$LOGS/install.log" 2>&1
}

: >"$LOGS/install.log"
if ! sees_device "$PYTHON" && ! has_device; then
    say "FAILED: this machine has no CUDA device, or no driver: nvidia-smi -L lists none"
    exit 1
fi
if ! sees_device "$PYTHON" || lacks "$PYTHON"; then
    "$PYTHON" -m venv --system-site-packages "$VENV" >>"$LOGS/install.log" 2>&1 || {
        say "FAILED: '$PYTHON -m venv' makes no environment, see $LOGS/install.log. Give an interpreter: PYTHON=..."
        exit 1
    }
    INSIDE=$VENV/bin/python
    sees_device "$INSIDE" || install "$INSIDE" "torch>=2.6,<3" || say "FAILED: torch was not installed, see $LOGS/install.log"
    # the torch that sees the device stays
    "$INSIDE" -c 'import torch; print("torch==" + torch.__version__.partition("+")[0])' >"$LOGS/constraints.txt" || exit 1
    install "$INSIDE" -c "$LOGS/constraints.txt" "cloudpickle>=3.0,<4" "gymnasium>=1.1,<2" "hypothesis>=6.100,<7" \
        "numpy>=2.0,<3" pytest pytest-timeout pytest-xdist "rich>=13.7,<16" "safetensors>=0.7,<1" \
        "tensordict>=0.14.3,<0.15" "torchrl>=0.14.1,<0.15" "tyro>=1.0,<2" ||
        say "FAILED: packages were not installed, see $LOGS/install.log"
    PYTHON=$INSIDE
fi
"$PYTHON" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())' \
    >"$LOGS/device.txt" 2>&1 || {
    say "FAILED: torch sees no CUDA device: $(tail -n 1 "$LOGS/device.txt")"
    exit 1
}
say "$(cat "$LOGS/device.txt")"

failed=0

# part NAME SECONDS COMMAND...: at its limit it is interrupted, so that it can still say what it has found
part() {
    name=$1
    limit=$2
    shift 2
    began=$(date +%s)
    # the status of the command, not that of tee
    {
        timeout -s INT -k 10 "$limit" "$@" 2>&1
        echo $? >"$LOGS/status"
    } | tee "$LOGS/$name.log"
    status=$(cat "$LOGS/status")
    rm -f "$LOGS/status"
    verdict=passed
    [ "$status" = 0 ] || verdict="FAILED with status $status"
    [ "$status" = 124 ] || [ "$status" = 137 ] && verdict="FAILED: stopped after $limit s"
    [ "$status" = 0 ] || failed=1
    say "$name: $verdict, $(($(date +%s) - began)) s; $(tail -n 1 "$LOGS/$name.log")"
}

# tests NAME SECONDS FILE...
tests() {
    name=$1
    limit=$2
    shift 2
    part "$name" "$limit" "$PYTHON" -m pytest $parallel -q -rfE --continue-on-collection-errors -k "cuda or capture" \
        -m "not slow" -o addopts=--import-mode=importlib -p no:cacheprovider "$@"
}

parallel=$("$PYTHON" -c 'import xdist; print("-n 8")' 2>/dev/null)
recorded=tests/unit/test_capture_cuda.py
# Tests with a CUDA device as a parameter.
others=$(grep -rlE 'cuda\.is_available|import .*\bCUDA\b' tests/unit tests/contract --include='test_*.py' |
    grep -v "^$recorded$")
tests recorded_rollouts 90 "$recorded"
part benchmark 225 "$PYTHON" -m benchmarks.on_device --output "$FOLDER/on_device.json"
part ppo 70 "$PYTHON" -m benchmarks.ppo_on_device --output "$FOLDER/ppo_on_device.json"
# shellcheck disable=SC2086
tests other_tests 80 $others
exit $failed
