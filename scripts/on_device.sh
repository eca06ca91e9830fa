#!/bin/sh
# All that needs a CUDA device, in at most eight minutes: the tests, the benchmark of collecting, and PPO until CartPole
# is solved. `make device` runs it; `PYTHON=... scripts/on_device.sh [FOLDER]` needs only torch, torchrl, gymnasium and
# pytest. Results go to FOLDER, or benchmarks/results.
set -u
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python3}
FOLDER=${1:-benchmarks/results}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$FOLDER"
"$PYTHON" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())' || exit 1
failed=0

# Tests with a CUDA device as a parameter, or that record graphs.
files=$(grep -rlE 'cuda\.is_available|import .*\bCUDA\b' tests/unit tests/contract --include='test_*.py')
parallel=$("$PYTHON" -c 'import xdist; print("-n 8")' 2>/dev/null)
# shellcheck disable=SC2086
timeout 180 "$PYTHON" -m pytest $parallel -q -k "cuda or capture" -m "not slow" -o addopts=--import-mode=importlib \
    -p no:cacheprovider $files || failed=1
timeout 240 "$PYTHON" -m benchmarks.on_device --output "$FOLDER/on_device.json" || failed=1
timeout 60 "$PYTHON" -m benchmarks.ppo_on_device --output "$FOLDER/ppo_on_device.json" || failed=1
exit $failed
