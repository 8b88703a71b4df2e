"""Explain predictions: the registered explanation methods and what runs them (`cv.explain`, `cv.compare`)."""
