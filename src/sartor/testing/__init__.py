"""What tests, the lab and users check attention with: inputs, the float64 oracle, error budgets.

The budget is derived, never typed in. A result may be wrong by `factor` times the error of the same mathematics done
by PyTorch in the inputs' own dtype, plus what cannot be avoided: the rounding of the result's dtype, and the noise of
recomputing exp(s - lse) in float32, a relative error of 2^-22 (1 + |s|max) in each term of a sum. The rule holds for
the largest error and for every row, because a wrong row hides behind another's larger error; over every head the root
mean square may be at most 1.2 times PyTorch's, FlexAttention's rule.
"""

from sartor.testing.budgets import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    RMS_FACTOR,
    Budget,
    Errors,
    check,
    check_all,
    cosine,
    measure,
    verify,
)
from sartor.testing.inputs import DATA, layouts, make_inputs, make_like, spread
from sartor.testing.oracle import (
    Magnitudes,
    low_precision,
    low_precision_gradients,
    magnitudes,
    reference,
    reference_gradients,
)

__all__ = [
    "DATA", "FORWARD_FACTOR", "GRADIENT_FACTOR", "RMS_FACTOR", "Budget", "Errors", "Magnitudes", "check", "check_all",
    "cosine", "layouts", "low_precision", "low_precision_gradients", "magnitudes", "make_inputs", "make_like",
    "measure", "reference", "reference_gradients", "spread", "verify",
]  # fmt: skip
