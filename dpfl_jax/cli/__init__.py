"""The command line ``dpfl``: one module for each command."""
