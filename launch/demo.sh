#!/usr/bin/env bash
# Serves SmolLM2, re-expressed as a GPT-OSS mixture of experts, on MPI ranks of this machine.
#   launch/demo.sh ask     asks one question, says what happened and stops the server
#   launch/demo.sh serve   keeps it up until Ctrl-C
# Environment: RANKS (2), LAYOUT (experts and requests spread over the ranks), MODEL (.cache/demo-model), PORT (ask: any
# free one, serve: 8000), DRAIN (seconds that running requests get when the server stops: 30).
set -euo pipefail
cd "$(dirname "$0")/.."

mode=${1:-ask}
ranks=${RANKS:-2}
model=${MODEL:-.cache/demo-model}
layout=${LAYOUT:---tp 1 --dp $ranks --ep $ranks}
port=${PORT:-8000}
if [ "$mode" = ask ]; then
  port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
elif [ "$mode" != serve ]; then
  echo "error: $0 $mode: say ask or serve" >&2
  exit 2
fi

[ -d "$model" ] || { mkdir -p "$(dirname "$model")" && rose convert smollm2 "$model"; }

log=.cache/demo-server.log
# shellcheck disable=SC2086  # LAYOUT is several words
server=(rose launch -n "$ranks" --drain-timeout "${DRAIN:-30}" -- serve "$model" --host 127.0.0.1 --port "$port" $layout)

if [ "$mode" = serve ]; then
  cat <<TEXT
Once it is ready, try:
  curl http://127.0.0.1:$port/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "$(basename "$model")", "messages": [{"role": "user", "content": "What is the capital of France?"}]}'
TEXT
  exec "${server[@]}"
fi

"${server[@]}" >"$log" 2>&1 &
pid=$!
trap 'kill "$pid" 2>/dev/null || true' EXIT

echo "starting $ranks ranks; their log is $log"
if ! python launch/demo_client.py "http://127.0.0.1:$port" --server-pid "$pid"; then
  echo "error: the demo failed; the server's last lines:" >&2
  tail -n 20 "$log" >&2
  exit 1
fi

trap - EXIT
kill -TERM "$pid"
code=0
wait "$pid" || code=$?
if [ "$code" != 0 ]; then
  echo "error: the server ended with exit code $code after SIGTERM; its last lines:" >&2
  tail -n 20 "$log" >&2
  exit 1
fi
echo "stopped cleanly"
