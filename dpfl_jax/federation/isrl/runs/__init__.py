"""From an ISRL-DP configuration to a run: tasks, sources, parameters, loop, report."""
