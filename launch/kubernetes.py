#!/usr/bin/env python3
r"""One run on many hosts of a Kubernetes cluster (GKE or other), as a JobSet.

Submits a JobSet whose pods all run `dpfl train CONFIG key=value ... --run-dir RUN_DIR`: one pod
per host, with its TPU chips or GPUs. CONFIG, the data and RUN_DIR are paths in the pods; RUN_DIR
must be on a volume that all of them mount for writing (--claim, mounted at --mount), or in a bucket
(gs://, s3://). If a pod is lost, all are started again and resume from the last checkpoint: as
often as needed if the cluster evicted it, else at most --restarts times. Bad input (status 2) is
never repeated. Needs kubectl, and JobSet 0.10 or newer in the cluster. launch/Dockerfile makes an
image.

examples:
  launch/kubernetes.py --name mine --image IMAGE --claim shared --tpu v5e:4x4 \
      /shared/job.yaml /shared/runs/mine
  launch/kubernetes.py --name mine --image IMAGE --claim shared --tpu v5e:16x16 --slices 2 --spot \
      --queue research /shared/job.yaml /shared/runs/mine
  launch/kubernetes.py --name mine --image IMAGE --claim shared --hosts 4 --gpus 8 \
      --select cloud.google.com/gke-accelerator=nvidia-h100-80gb --rdma rdma/ib=8 \
      /shared/job.yaml /shared/runs/mine train.steps=1000 --dry-run
  launch/kubernetes.py --name mine --image IMAGE --tpu v5e:4x4 /app/job.yaml gs://bucket/runs/mine
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
_SPOT = "cloud.google.com/gke-spot"
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
    parser.add_argument(
        "--claim", help="PersistentVolumeClaim (ReadWriteMany); not needed if all is in buckets"
    )
    parser.add_argument("--mount", default="/shared", help="where it is mounted")
    parser.add_argument("--namespace", default="default")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--tpu", metavar="KIND:SHAPE", help="a whole slice, e.g. v5e:4x4")
    kind.add_argument("--gpus", type=int, metavar="G", help="GPUs of each host")
    parser.add_argument("--hosts", type=int, help="how many (a slice says it itself)")
    parser.add_argument("--slices", type=int, default=1, help="so many TPU slices (GKE; default 1)")
    parser.add_argument("--cpu", help="CPUs that a pod asks for; default two for each chip or GPU")
    parser.add_argument("--memory", help="memory that it asks for; default 8Gi for each")
    parser.add_argument("--spot", action="store_true", help="on GKE's spot machines")
    for option, help in (
        ("--select", "take only nodes with this label"),
        ("--tolerate", "take nodes with this taint, too"),
        ("--rdma", "ask for network devices, e.g. rdma/ib=8 or vpc.amazonaws.com/efa=4"),
    ):
        parser.add_argument(
            option, action="append", default=[], type=_pair, metavar="KEY=VALUE", help=help
        )
    parser.add_argument("--queue", help="Kueue's local queue that starts it")
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
    if not args.claim and "://" not in args.run_dir:
        parser.error(f"RUN_DIR is {args.run_dir}, which only this pod would see: give --claim, the "
                     "volume that holds it, or an address in a bucket (gs://, s3://)")  # fmt: skip
    if args.slices < 1 or (args.slices > 1 and not args.tpu):
        parser.error("--slices must be at least 1, and needs --tpu above that")
    return args


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _taint(key: str, value: str | None = None) -> dict[str, str]:
    """Tolerates a taint that keeps pods from nodes, with any value or with this one."""
    if value is None:
        return {"key": key, "operator": "Exists", "effect": "NoSchedule"}
    return {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"}


def manifest(args: argparse.Namespace) -> dict[str, Any]:
    """The JobSet."""
    selector = dict(args.select)
    if args.tpu:
        generation, _, shape = args.tpu.partition(":")
        accelerator, count = "google.com/tpu", args.chips
        selector["cloud.google.com/gke-tpu-accelerator"] = TPUS[generation][0]
        selector["cloud.google.com/gke-tpu-topology"] = shape
    else:
        accelerator, count = "nvidia.com/gpu", args.gpus
    # Nodes with accelerators are kept from pods that do not ask for them.
    tolerations = [_taint(accelerator), *(_taint(*pair) for pair in args.tolerate)]
    if args.spot:
        selector[_SPOT] = "true"
        tolerations.append(_taint(_SPOT, "true"))
    devices = {accelerator: count, **dict(args.rdma)}
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    if args.slices > 1:  # GKE tells the pods of several slices who they are
        members = [{"name": "DPFL_PROCESSES", "value": "detect"}]
    else:
        members = [
            {"name": "DPFL_COORDINATOR", "value": f"{args.name}-run-0-0.{args.name}:{PORT}"},
            {"name": "DPFL_NUM_PROCESSES", "value": str(args.hosts)},
            {"name": "DPFL_PROCESS_ID", "valueFrom": {"fieldRef": index}},
        ]
    container = {
        "name": "dpfl",
        "image": args.image,
        "command": ["dpfl", "train", args.config, *args.overrides, "--run-dir", args.run_dir],
        "env": [*members],
        "ports": [{"containerPort": PORT, "protocol": "TCP"}],
        "resources": {
            # A pod that asks for no memory is the first to be evicted.
            "requests": {
                "cpu": args.cpu or str(2 * count),
                "memory": args.memory or f"{8 * count}Gi",
                **devices,
            },
            "limits": devices,
        },
        "volumeMounts": [
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    if args.rdma:  # these devices write into memory that must stay where it is
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    pod = {
        "restartPolicy": "Never",
        # Time to save a checkpoint when the pod is told to go.
        "terminationGracePeriodSeconds": 120,
        "nodeSelector": selector,
        "tolerations": tolerations,
        "containers": [container],
        "volumes": [
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if args.claim:
        claim = {"claimName": args.claim}
        pod["volumes"].append({"name": "shared", "persistentVolumeClaim": claim})
        container["volumeMounts"].append({"name": "shared", "mountPath": args.mount})
        # Of the volume and not beside RUN_DIR, which may be sent: its programs are run.
        cache = {"name": _CACHE, "value": f"{args.mount}/.cache/dpfl_jax/compiled"}
        container["env"].append(cache)
    if args.slices > 1:  # the network between slices is the hosts' own
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    bad_input = {"containerName": "dpfl", "operator": "In", "values": [2]}
    evicted = {"type": "DisruptionTarget", "status": "True"}
    job = {
        "backoffLimit": 0,
        "completionMode": "Indexed",
        "completions": args.hosts,
        "parallelism": args.hosts,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": bad_input},
                {"action": "FailJob", "onPodConditions": [evicted]},
            ]
        },
        "template": {"spec": pod},
    }
    metadata: dict[str, Any] = {"name": args.name, "namespace": args.namespace}
    if args.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": args.queue}
    if args.tpu:  # a node pool of GKE is one slice, for one job of the set
        topology = "cloud.google.com/gke-nodepool"
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": topology}
    # A pod that fails otherwise (also because another was lost) matches no rule, and is counted.
    rules = [
        _rule("evicted", "RestartJobSetAndIgnoreMaxRestarts", "has condition DisruptionTarget"),
        _rule("badInput", "FailJobSet", "failed with exit code 2 "),
    ]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": args.restarts, "rules": rules},
            "replicatedJobs": [{"name": "run", "replicas": args.slices, "template": {"spec": job}}],
        },
    }


def _rule(name: str, action: str, message: str) -> dict[str, Any]:
    """A rule of the JobSet for jobs that their pods' failure policy ended with this message."""
    return {
        "name": name,
        "action": action,
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [f".*{message}.*"],
    }


def main(argv: list[str] | None = None) -> int:
    """Prints or submits."""
    args = parse(argv)
    text = yaml.safe_dump(manifest(args), sort_keys=False)
    if args.dry_run:
        print(text, end="")
        return 0
    return subprocess.run(["kubectl", "create", "-f", "-"], input=text, text=True).returncode


if __name__ == "__main__":
    sys.exit(main())
