"""The run around an algorithm: directory, checkpoints, keys, processes, progress, report."""
