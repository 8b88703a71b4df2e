"""Principal components of tokens, in float64, with signs that do not depend on the machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PrincipalComponents:
    """The orthonormal directions of largest variance; one without variance is a row of zeros."""

    mean: Tensor  # [d]
    components: Tensor  # [k, d]
    variances: Tensor  # [k], descending; sums over n tokens are divided by n − 1
    total_variance: float  # of all d directions

    @property
    def ratios(self) -> Tensor:
        """The share of each component in the total variance, [k]; zeros where there is none."""
        return self.variances / self.total_variance if self.total_variance > 0 else torch.zeros_like(self.variances)

    def project(self, tokens: Tensor) -> Tensor:
        """Return (x − mean) · components, […, k] in float64, of tokens […, d]."""
        return (tokens.double() - self.mean) @ self.components.T


def principal_components(tokens: Tensor, count: int = 3) -> PrincipalComponents:
    """Return the first `count` principal components of tokens [n, d]; n ≥ 2 and `count` ≤ d.

    They are the eigenvectors of C = Σ (x − x̄)(x − x̄)ᵀ / (n − 1), from a singular value decomposition of the centred
    tokens where n < d. The entry of largest magnitude of each component is positive (the first of equal ones), as in
    scikit-learn's PCA, so that the basis does not depend on the order of the tokens.
    """
    tokens = tokens.double()
    n, d = tokens.shape
    mean = tokens.mean(0)
    centred = tokens - mean
    if n < d:
        _, singular, rows = torch.linalg.svd(centred, full_matrices=False)
        variances, directions = singular.square() / (n - 1), rows
    else:
        ascending, columns = torch.linalg.eigh(centred.T @ centred / (n - 1))
        variances, directions = ascending.flip(0).clamp(min=0), columns.T.flip(0)
    missing = max(0, count - len(variances))
    variances = torch.cat([variances[:count], variances.new_zeros(missing)])
    directions = torch.cat([directions[:count], directions.new_zeros(missing, d)])
    # What rounding alone explains is no variance: of the mean of n equal tokens, and of the decomposition.
    eps = torch.finfo(torch.float64).eps
    of_mean = 2 * d * (n * eps * float(tokens.abs().max())) ** 2
    has_variance = variances > max(of_mean, eps * max(n, d) * float(variances[0]))
    variances = variances * has_variance
    total = float(centred.square().sum() / (n - 1)) if bool(has_variance[0]) else 0.0
    return PrincipalComponents(mean, _fix_signs(directions) * has_variance[:, None], variances, total)


def _fix_signs(components: Tensor) -> Tensor:
    """Return components [k, d], each with the sign that makes its entry of largest magnitude positive."""
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))  # [k, 1]
    return torch.where(largest < 0, -components, components)
