#include "rotary.h"

namespace outrider {

// The angle is rounded to fp32, as in the implementations that models are trained with. Its sine and cosine are computed in double, by
// polynomials on +-pi/4, so that they are correctly rounded to fp32 but for rare ties.
void rotary_angles(int position, const float *frequencies, int half, float factor, float *cosine, float *sine) {
  for (int i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position) * frequencies[i];
    const double x = static_cast<double>(angle);
    const double magic = 6755399441055744.0;  // adding and subtracting 1.5 * 2^52 rounds to an integer
    const double turns = (x * 0.63661977236758134308 + magic) - magic;
    const double r = (x - turns * 1.57079632673412561417e+00) - turns * 6.07710050650619224932e-11;
    const double z = r * r;
    double s = -2.50507602534068634195e-08;
    s = s * z + 2.75573137070700676789e-06;
    s = s * z + -1.98412698298579493134e-04;
    s = s * z + 8.33333333332248946124e-03;
    s = s * z + -1.66666666666666324348e-01;
    s = r + r * z * s;
    double c = 2.08757232129817482790e-09;
    c = c * z + -2.75573143513906633035e-07;
    c = c * z + 2.48015872894767294178e-05;
    c = c * z + -1.38888888888741095749e-03;
    c = c * z + 4.16666666666666019037e-02;
    c = 1.0 - 0.5 * z + z * z * c;
    const int quadrant = static_cast<int>(static_cast<long long>(turns) & 3);
    const double sin_x = quadrant == 0 ? s : quadrant == 1 ? c : quadrant == 2 ? -s : -c;
    const double cos_x = quadrant == 0 ? c : quadrant == 1 ? -s : quadrant == 2 ? -c : s;
    cosine[i] = static_cast<float>(cos_x) * factor;
    sine[i] = static_cast<float>(sin_x) * factor;
  }
}

}  // namespace outrider
