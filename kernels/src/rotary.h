// Sines and cosines of rotary embedding.
#ifndef OUTRIDER_SRC_ROTARY_H
#define OUTRIDER_SRC_ROTARY_H

namespace outrider {

// cosine, sine: out [half], of the angle position * frequencies[i], rounded to fp32; both times factor.
void rotary_angles(int position, const float *frequencies, int half, float factor, float *cosine, float *sine);

}  // namespace outrider

#endif
