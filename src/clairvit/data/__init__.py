"""Data: images with masks and true classes, read lazily, and how to find masks where there are none."""
