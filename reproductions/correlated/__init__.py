"""Noise that later steps take back, against independent noise."""
