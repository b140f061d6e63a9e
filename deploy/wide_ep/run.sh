#!/usr/bin/env bash
# run.sh MODEL RANKS SLOTS: records the load of experts, writes slots for it, and serves with them. On CPU ranks.
set -euo pipefail
model=$1 ranks=$2 slots=$3
folder=$(mktemp -d) port=${PORT:-8000}
common=(--port "$port" --device cpu --num_threads 1 --tp_size "$ranks" --ep_size "$ranks" --enable_attention_dp
  --set moe_config.backend=WIDEEP)

penstock serve "$model" "${common[@]}" --set moe_config.load_record_path="$folder/load.json" &
server=$!
trap 'kill "$server" 2> /dev/null || true; wait "$server" || true; rm -r "$folder"' EXIT
until curl -sf "http://127.0.0.1:$port/health" > /dev/null; do kill -0 "$server"; sleep 1; done
until [ -s "$folder/load.json" ]; do
  curl -sf "http://127.0.0.1:$port/v1/completions" -H 'Content-Type: application/json' \
    -d '{"model": "any", "prompt": "The", "max_tokens": 64, "ignore_eos": true}' > /dev/null
done
kill "$server"
wait "$server" || true

penstock eplb "$folder/load.json" --ep_size "$ranks" --num_slots "$slots" --layer_updates_per_iter 1 -o "$folder/eplb.yaml"
penstock serve "$model" "${common[@]}" --set moe_config.load_balancer="$folder/eplb.yaml" &
server=$!
wait "$server"
