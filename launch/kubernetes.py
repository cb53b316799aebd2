#!/usr/bin/env python3
r"""One run on many hosts of a Kubernetes cluster (GKE or other), as a JobSet.

Submits a JobSet whose pods all run `dpfl train CONFIG key=value ... --run-dir RUN_DIR`: one pod
per host, with its TPU chips or GPUs. CONFIG, the data and RUN_DIR are paths in the pods; RUN_DIR
must be on a volume that all of them mount for writing (--claim, mounted at --mount). If a pod is
lost all are started again, at most --restarts times, and go on from the last checkpoint; bad input
(status 2) is never repeated. Needs kubectl and the JobSet controller in the cluster.

examples:
  launch/kubernetes.py --name mine --image IMAGE --claim shared --tpu v5e:4x4 \
      /shared/job.yaml /shared/runs/mine
  launch/kubernetes.py --name mine --image IMAGE --claim shared --hosts 4 --gpus 8 \
      /shared/job.yaml /shared/runs/mine train.steps=1000 --dry-run
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from typing import Any

import yaml

PORT = 8476
_CACHE = "JAX_COMPILATION_CACHE_DIR"
# GKE's name of each kind of slice, and the chips of one of its hosts.
TPUS = {
    "v4": ("tpu-v4-podslice", 4),
    "v5e": ("tpu-v5-lite-podslice", 4),
    "v5p": ("tpu-v5p-slice", 4),
    "v6e": ("tpu-v6e-slice", 4),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--name", required=True, help="of the JobSet")
    parser.add_argument("--image", required=True, help="with dpfl_jax and its extra tpu or cuda")
    parser.add_argument("--claim", required=True, help="PersistentVolumeClaim (ReadWriteMany)")
    parser.add_argument("--mount", default="/shared", help="where it is mounted")
    parser.add_argument("--namespace", default="default")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--tpu", metavar="KIND:SHAPE", help="a whole slice, e.g. v5e:4x4")
    kind.add_argument("--gpus", type=int, metavar="G", help="GPUs of each host")
    parser.add_argument("--hosts", type=int, help="how many (a slice says it itself)")
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--dry-run", action="store_true", help="print the manifest and stop")
    args = parser.parse_intermixed_args(argv)
    if args.tpu:
        generation, _, shape = args.tpu.partition(":")
        sides = shape.split("x")
        if generation not in TPUS or not all(side.isdigit() and int(side) for side in sides):
            parser.error(f"--tpu is {args.tpu!r}, but must be one of {', '.join(TPUS)}, a colon "
                         "and a shape, e.g. v5e:4x4")  # fmt: skip
        chips = math.prod(map(int, sides))
        args.chips = min(chips, TPUS[generation][1])
        if args.hosts not in (None, chips // args.chips):
            parser.error(f"--hosts is {args.hosts}, but {args.tpu} has {chips // args.chips}")
        args.hosts = chips // args.chips
    elif not args.hosts or args.hosts < 1 or args.gpus < 1:
        parser.error("--gpus needs --hosts, and both must be at least 1")
    return args


def manifest(args: argparse.Namespace) -> dict[str, Any]:
    """The JobSet."""
    if args.tpu:
        generation, _, shape = args.tpu.partition(":")
        resources = {"google.com/tpu": args.chips}
        selector = {
            "cloud.google.com/gke-tpu-accelerator": TPUS[generation][0],
            "cloud.google.com/gke-tpu-topology": shape,
        }
    else:
        resources, selector = {"nvidia.com/gpu": args.gpus}, {}
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    container = {
        "name": "dpfl",
        "image": args.image,
        "command": ["dpfl", "train", args.config, *args.overrides, "--run-dir", args.run_dir],
        "env": [
            {"name": "DPFL_COORDINATOR", "value": f"{args.name}-run-0-0.{args.name}:{PORT}"},
            {"name": "DPFL_NUM_PROCESSES", "value": str(args.hosts)},
            {"name": "DPFL_PROCESS_ID", "valueFrom": {"fieldRef": index}},
            # Of the volume and not beside RUN_DIR, which may be sent: its programs are run.
            {"name": _CACHE, "value": f"{args.mount}/.cache/dpfl_jax/compiled"},
        ],
        "ports": [{"containerPort": PORT}],
        "resources": {"limits": resources},
        "volumeMounts": [
            {"name": "shared", "mountPath": args.mount},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "restartPolicy": "Never",
        # Time to save a checkpoint when the pod is told to go.
        "terminationGracePeriodSeconds": 120,
        "nodeSelector": selector,
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": args.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    job = {
        "backoffLimit": 0,
        "completionMode": "Indexed",
        "completions": args.hosts,
        "parallelism": args.hosts,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "dpfl", "operator": "In", "values": [2]},
                }
            ]
        },
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": args.name, "namespace": args.namespace},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": args.restarts,
                "rules": [
                    {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
                ],
            },
            "replicatedJobs": [{"name": "run", "replicas": 1, "template": {"spec": job}}],
        },
    }


def main(argv: list[str] | None = None) -> int:
    """Prints or submits."""
    args = parse(argv)
    text = yaml.safe_dump(manifest(args), sort_keys=False)
    if args.dry_run:
        print(text, end="")
        return 0
    return subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True).returncode


if __name__ == "__main__":
    sys.exit(main())
