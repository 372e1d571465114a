#!/usr/bin/env bash
# NVIDIA Dynamo's frontend and its mocker (an engine without cost) from PyPI on 127.0.0.1:PORT, as the model "smollm2", in the
# foreground: dynamo.sh MODEL_DIR PORT {nats|tcp}. MODEL_DIR holds config and tokenizer. nats-server must be on PATH.
set -euo pipefail
model=${1:?MODEL_DIR} port=${2:?PORT} plane=${3:?nats|tcp}
home=${PEERS_HOME:-$HOME/.cache/headrace-peers}/dynamo
if [[ ! -x $home/bin/python ]]; then
    python3 -m venv "$home"
    "$home/bin/pip" install -q --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
    "$home/bin/pip" install -q aiohttp certifi kubernetes msgspec prometheus-client pyzmq redis tqdm transformers \
        typing-extensions zstandard uvloop nats-py
fi
state=$(mktemp -d)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null; wait; rm -rf "$state"' EXIT
nats_port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
nats-server -a 127.0.0.1 -p "$nats_port" -js -sd "$state/js" >"$state/nats.log" 2>&1 &
pids+=($!)
export NATS_SERVER=nats://127.0.0.1:$nats_port DYN_DISCOVERY_BACKEND=file DYN_FILE_KV="$state/kv" DYN_REQUEST_PLANE="$plane"
export HF_HUB_OFFLINE=1
mkdir -p "$state/kv"
"$home/bin/python" -m dynamo.mocker --model-path "$model" --model-name smollm2 --speedup-ratio 1000 --max-num-seqs 256 \
    --discovery-backend file --request-plane "$plane" --event-plane nats >"$state/mocker.log" 2>&1 &
pids+=($!)
"$home/bin/python" -m dynamo.frontend --http-host 127.0.0.1 --http-port "$port" --discovery-backend file \
    --request-plane "$plane" --router-mode round-robin &
pids+=($!)
wait
