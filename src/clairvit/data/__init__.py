"""Data: images with what is known about them, and how to find out what is not."""
