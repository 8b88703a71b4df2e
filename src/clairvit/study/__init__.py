"""Studies: models × data × methods × metrics, cut into units that are computed once, stored, resumed and ranked.

And models trained for them (`finetune`).
"""
