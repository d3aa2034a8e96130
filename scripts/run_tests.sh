#!/bin/sh
# All tests, in two processes: those that start the services, one at a time (worker and runner take all cores and
# wait for each other in loops), and beside them the others. Their output comes one after the other.
# usage: run_tests.sh PYTHON
set -u

python=$1
log=$(mktemp)
"$python" -m pytest tests/e2e tests/gelo_cli >"$log" 2>&1 &
services=$!
trap 'kill "$services" 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT TERM

"$python" -m pytest --ignore=tests/e2e --ignore=tests/gelo_cli
others=$?
wait "$services"
with_services=$?
cat "$log"
[ "$others" -eq 0 ] && [ "$with_services" -eq 0 ]
