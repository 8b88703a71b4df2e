"""A whole data set at once: does the model look where it should, and which answers are wrong?"""
