#!/usr/bin/env bash
# Runs all checks and benchmarks that need a GPU (gpu_all.py); writes benchmarks/results/gpu-DATE.md.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
exec "$(python3 tools/bootstrap.py)" benchmarks/gpu_all.py "$@"
