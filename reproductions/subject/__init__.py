"""Subject-level privacy in federated learning (Marathe et al., texts "A" and "B").

A: "Subject Granular Differential Privacy in Federated Learning". B: "Subject Level Differential
Privacy with Hierarchical Gradient Averaging".
"""
