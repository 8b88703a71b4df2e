"""Figures and files of explanations and scores. Maps are clipped, upsampled and coloured here only."""
