"""Record what single methods need beyond block inputs, queries, keys, values and their gradients."""
