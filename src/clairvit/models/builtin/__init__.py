"""Weights, labels and cards of the built-in models."""
