"""One small configuration of each system with silos."""

SILOS = {
    "federated": {
        "data": {"source": "digits", "records_per_user": 6},
        "federation": {
            "silos": 11,  # the last chunk is padded
            "rounds": 4,
            "local_steps": 2,
            "local_state": "keep",
            "local_optimizer": {"name": "sgd", "learning_rate": 0.5, "options": {"momentum": 0.5}},
        },
        "model": {"kind": "mlp", "options": {"hidden": [8]}},
        "mechanism": {"kind": "hi_grad_avg", "sampling_prob": 0.2, "max_records_per_subject": 3},
        "privacy": {"epsilon": 8.0, "delta": 1e-4},
        "train": {"checkpoint_every": 1},
        "execution": {"microbatch_size": 16},
    },
    "personal": {
        "data": {"source": "digits", "records_per_user": 1},
        "federation": {"silos": 5, "rounds": 4, "local_steps": 2, "participation_prob": 0.7},
        "model": {"kind": "mlp", "options": {"hidden": [8]}},
        "mechanism": {"kind": "rpdp"},
        "privacy": {"epsilon": 8.0, "delta": 1e-4},
        "train": {"checkpoint_every": 1},
        "execution": {"microbatch_size": 16},
    },
    "isrl": {
        "data": {"source": "digits", "max_users": 400},
        "federation": {"silos": 8, "partition": "uniform", "rounds": 6},
        "mechanism": {"kind": "minibatch_sgd", "step_size": 0.5},
        "privacy": {"epsilon": 8.0},
        "train": {"checkpoint_every": 1},
        "execution": {"rounds_per_block": 2},
    },
}
