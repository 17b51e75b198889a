#!/usr/bin/env bash
# Runs everything that waits for a GPU, and writes benchmarks/results/gpu-DATE.md: gpu_all.py.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
exec "$(python3 tools/bootstrap.py)" benchmarks/gpu_all.py "$@"
