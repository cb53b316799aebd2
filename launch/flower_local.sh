#!/usr/bin/env bash
set -euo pipefail
usage() {
  cat <<'TEXT'
Silos and a server as separate processes on one machine, over TLS with certificates made here.

  launch/flower_local.sh RUN_DIR                                 three made-up hospitals
  launch/flower_local.sh RUN_DIR study.yaml bern=bern.csv chur=chur.csv ...
  launch/flower_local.sh --resume RUN_DIR ...                    go on with what is there
  launch/flower_local.sh --dry-run RUN_DIR ...                   print the commands alone

RUN_DIR keeps all that the parties would have on their own machines: certificates, a folder for each
silo (with its key, log and ledger), the server's run. It must not exist: who else made it knows its
keys, and wrote its silo.yaml. With --resume, for one that this script made, everything goes on.
PORT (default 8000) is the server's.
TEXT
}
dry='' resume=''
case ${1:-} in
  -h | --help) usage; exit 0 ;;
  --dry-run) dry=1; shift ;;
  --resume) resume=1; shift ;;
esac
case ${1:--} in
  -*) usage >&2; exit 2 ;;
esac

dir=$1
port=${PORT:-8000}
study=${2:-$dir/study.yaml}
certificates=$dir/certificates
serve=(dpfl silo serve "$study" --run-dir "$dir/run" --port "$port"
  --certificate "$certificates/server.pem" --key "$certificates/server.key")
if [ -n "$dry" ]; then
  [ $# -gt 1 ] || set -- "$dir" "$study" aarau= bern= chur=
  for silo in "${@:3}"; do printf 'dpfl silo run %q --finish\n' "$dir/silo-${silo%%=*}"; done
  printf '%q ' "${serve[@]}"; echo
  exit 0
fi
if [ -z "$resume" ]; then
  mkdir -p "$(dirname "$dir")"
  if ! mkdir -m 700 "$dir" 2>/dev/null; then
    echo "flower_local: $dir exists: name a new RUN_DIR, or give --resume if this script made it here" >&2
    exit 2
  fi
fi

if [ $# -lt 2 ]; then
  set -- "$dir" "$study" aarau="$dir/aarau.csv" bern="$dir/bern.csv" chur="$dir/chur.csv"
  if [ ! -f "$study" ]; then
    python -I - "$dir" <<'PYTHON'
import csv, math, pathlib, random, sys

folder, rng = pathlib.Path(sys.argv[1]), random.Random(0)
for name, people in (("aarau", 230), ("bern", 170), ("chur", 300)):
    with (folder / f"{name}.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["person", "age", "dose", "sick"])
        for i in range(people):
            for _ in range(rng.randint(1, 3)):
                age, dose = rng.uniform(25, 75), rng.uniform(0, 2)
                sick = int(rng.random() < 1 / (1 + math.exp((50 - age) / 6)))
                rows.writerow([f"{name}-{i}", f"{age:.1f}", f"{dose:.2f}", sick])
(folder / "study.yaml").write_text("""\
name: made-up-hospitals
data:
  source: csv
  user_column: person
  target_column: sick
  classes: 2
  scale: {age: [50, 25], dose: [1, 1]}
federation:
  silos: 3
  partition: natural
  max_silos_per_subject: 1
  rounds: 10
  local_steps: 5
  local_optimizer: {name: sgd, learning_rate: 0.5}
model: {kind: logistic}
mechanism: {kind: hi_grad_avg, sampling_prob: 0.2, max_records_per_subject: 3}
privacy: {epsilon: 4.0, delta: 1.0e-4}
train: {checkpoint_every: 1}
""")
PYTHON
  fi
fi
shift 2

# A certificate of our own signs the server's; silos trust it and no other.
if [ ! -f "$certificates/server.pem" ]; then
  mkdir -p "$certificates"
  (
    cd "$certificates"
    umask 077
    openssl req -x509 -newkey rsa:3072 -nodes -days 365 -keyout ca.key -out ca.pem \
      -subj "/CN=study" -addext keyUsage=critical,keyCertSign,cRLSign 2>/dev/null
    openssl req -newkey rsa:3072 -nodes -keyout server.key -out server.csr \
      -subj "/CN=localhost" 2>/dev/null
    printf 'subjectAltName=IP:127.0.0.1,DNS:localhost\nbasicConstraints=CA:FALSE\nauthorityKeyIdentifier=keyid\n' > names
    openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 365 \
      -out server.pem -extfile names 2>/dev/null
  )
fi

started=() server=
trap 'kill $server "${started[@]}" 2>/dev/null || true; wait' EXIT
for silo in "$@"; do
  name=${silo%%=*}
  if [ ! -f "$dir/silo-$name/silo.yaml" ]; then
    dpfl silo init "$dir/silo-$name" --name "$name" --config "$study" --data "${silo#*=}" \
      --server "127.0.0.1:$port" --root-certificates "$certificates/ca.pem"
  fi
  dpfl silo run "$dir/silo-$name" --finish > "$dir/silo-$name.out" 2>&1 &
  started+=($!)
done
"${serve[@]}" &
server=$!
names=("$@")
while kill -0 "$server" 2>/dev/null; do
  for i in "${!started[@]}"; do
    kill -0 "${started[$i]}" 2>/dev/null && continue
    if ! wait "${started[$i]}"; then # the server would wait for it
      echo "silo ${names[$i]%%=*} has ended:" >&2
      tail -n 5 "$dir/silo-${names[$i]%%=*}.out" >&2
      exit 1
    fi
    unset "started[$i]"
  done
  sleep 1
done
wait "$server"
[ ${#started[@]} -eq 0 ] || wait "${started[@]}"
started=() server=
for silo in "$@"; do
  dpfl silo check "$dir/silo-${silo%%=*}"
done
