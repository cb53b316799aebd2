#!/usr/bin/env bash
# Flower's quickstart-numpy with dpfl_jax's client mod: a SuperLink and two SuperNodes on loopback.
# The budget is 3 rounds, and the server asks for 4: the last is refused.
#   examples/flower_quickstart/run.sh DIR       DIR: new; it gets the clients' folders and the logs
set -euo pipefail
app=$(cd "$(dirname "$0")" && pwd)
mkdir "$1" && dir=$(cd "$1" && pwd)
cd "$dir" # where the app writes its model
link=${PORT:-19350}
export FLWR_HOME=$dir/flwr FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
mkdir "$FLWR_HOME"
printf '[superlink]\ndefault = "loopback"\n\n[superlink.loopback]\naddress = "127.0.0.1:%d"\ninsecure = true\n' \
  "$link" >"$FLWR_HOME/config.toml"
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
flower-superlink --insecure --host 127.0.0.1 --port "$link" \
  --disable-runtime-dependency-installation >"$dir/superlink.log" 2>&1 &
for client in 1 2; do
  flower-supernode --insecure --superlink "127.0.0.1:$link" --port $((link + client)) \
    --node-config "dpfl-folder=\"$dir/client-$client\"" >"$dir/client-$client.log" 2>&1 &
done
until flwr run "$app" loopback --run-config num-server-rounds=4 --stream >"$dir/run.log" 2>&1; do
  [ $((tries = ${tries:-0} + 1)) -lt 20 ] || { cat "$dir/run.log" && exit 1; }
  sleep 1
done
cat "$dir/run.log"
for client in 1 2; do dpfl verify "$dir/client-$client"; done
