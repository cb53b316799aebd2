"""Readers of data sets, from files you have or that come with the package; nothing is fetched.

Each module reads one family of formats and says, when a file is missing, what to put where.
"""
