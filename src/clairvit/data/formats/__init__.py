"""Layouts: the papers' data sets as their authors hand them out, one function and one registration line each."""
