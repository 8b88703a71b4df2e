"""Data: images with what is known of them, read when their turn comes."""
