"""Targets: what is explained, as a differentiable score per image."""
