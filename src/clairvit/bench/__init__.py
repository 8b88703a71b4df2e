"""Run studies: models × data × methods × metrics, split into units that are computed once, stored and resumed."""
