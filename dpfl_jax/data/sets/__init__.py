"""Readers of the papers' data sets, from files you already have; nothing is ever fetched.

Each module reads one family of formats and says, when a file is missing, what to put where.
"""
