"""Compatibility: presets and draws that reproduce the numbers of other packages and papers."""
