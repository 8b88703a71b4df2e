"""Compatibility: what other people's code computes, bugs included, under names that users can ask for."""
