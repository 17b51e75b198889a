#!/usr/bin/env bash
# The test command: sets up what is missing, then runs the tests. `--all` runs those marked slow,
# as CI does, and heavy, too; other arguments go to pytest.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# A test that hangs is shown with its stacks and named as failed: no other takes a tenth of this.
limit=1200
arguments=()
for argument in "$@"; do
    if [[ $argument == --all ]]; then
        arguments+=(-m "")
        limit=0 # heavy tests may take longer
    else
        arguments+=("$argument")
    fi
done
python=$(python3 "$root/tools/bootstrap.py")
"$python" -m mqo setup --dataset wikipedia --dataset dolma &
trap 'kill $! 2>/dev/null' EXIT # an interrupt does not reach what runs in the background
"$python" "$root/tests/get_packages.py"
wait $!
cd "$root"
# Two processes that share the cores must not spin while they wait for one another.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
# Containers set it; hundreds of processes would each compile the tests and tools anew.
unset PYTHONDONTWRITEBYTECODE
# Files side by side, in their order: the real runs, which take longest, are first.
exec "$python" -m pytest -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
    -o faulthandler_timeout=$limit -o faulthandler_exit_on_timeout=true "${arguments[@]}"
