"""Diagnostics: can this model be explained as it is, and how far can its explanations be trusted?"""
