"""Data: images with what is known of them, read when their turn comes, and how to find out what is not known."""
