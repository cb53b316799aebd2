"""Rounds over silos: local steps of a mechanism in each silo, then a server's rule."""
