#!/usr/bin/env bash
# Everything that only an NVIDIA GPU can show, within 8 minutes: the tests of the backends triton and cupy on the device,
# then their kernels' speed beside torch's and the copy bandwidth. Writes one JSON file.
#
# Usage, in the root of a checkout whose environment has the extras dev and cuda: bench/gpu_check.sh [gpu_check.json]
# PYTHON names another interpreter than .venv/bin/python.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/../.."
exec "${PYTHON:-.venv/bin/python}" -m pocketllm.bench.gpu_check "${1:-gpu_check.json}"
