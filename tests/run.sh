#!/usr/bin/env bash
# The test command: sets up what is missing, then runs the tests. Arguments go to pytest.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=$(python3 "$root/tools/bootstrap.py")
"$python" -m mqo setup
cd "$root"
exec "$python" -m pytest "$@"
