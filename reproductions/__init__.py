"""One module per figure or table of a paper: what it claims, what is measured, what holds.

A sub-package is a paper, a module in it (without leading underscore) a figure: ``subject/audit`` is
``reproductions.subject.audit``. Adding a module is all it takes to join (see ``registry``).
"""
