"""Lowy and Razaviyayn 2023: private federated learning without a trusted server."""
