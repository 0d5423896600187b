// The numbers in the formulas of a loss: 1 / temperature, then as in class Maths of
// growkern/ops/loss/rows/options.py. `python -m docs.options` writes this file.
#pragma once

namespace growkern {

template <typename Real>
struct Maths {
    Real inv_t, softcap, teacher_softcap, beta, label_smoothing, z_loss;
};

}  // namespace growkern
