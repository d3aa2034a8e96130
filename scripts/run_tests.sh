#!/bin/sh
# All tests, in two processes that take about as long: end-to-end tests, most of whose time goes to worker and
# runner, which take all cores and wait for each other in loops, and beside them the others. Their output comes
# one after the other.
# usage: run_tests.sh PYTHON
set -u

python=$1
# One of them is as slow as what the other process would otherwise lack.
services=$(ls tests/e2e/test_*.py | grep -v gemma3)
log=$(mktemp)
# shellcheck disable=SC2086  # a list of files
"$python" -m pytest $services >"$log" 2>&1 &
beside=$!
trap 'kill "$beside" 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT TERM

# shellcheck disable=SC2086
"$python" -m pytest $(printf -- '--ignore=%s ' $services)
others=$?
wait "$beside"
with_services=$?
cat "$log"
[ "$others" -eq 0 ] && [ "$with_services" -eq 0 ]
