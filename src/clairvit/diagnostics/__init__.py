"""Diagnostics: whether a model can be explained as it is, and how far its explanations can be trusted."""
