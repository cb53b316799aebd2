"""Liu et al. 2024 (CCS), "Cross-silo federated learning with record-level personalized DP"."""
