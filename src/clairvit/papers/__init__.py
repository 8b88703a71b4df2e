"""Reproduce the experiments of the papers and compare the results with the printed numbers."""
