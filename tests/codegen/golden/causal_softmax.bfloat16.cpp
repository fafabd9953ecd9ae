// causal_softmax: scale, causal mask and softmax in one pass; no mask is read, and nothing of the scores that it
// hides
// Moves 25,182,208 bytes at 32 x 512 x 512: every input is read once and every output written once.
// Origin: library kernel causal_softmax, variant triu
// Source: https://arxiv.org/abs/1706.03762
// Build: c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

// GCC would cut a loop in two where its variable is compared, and leave one of them without vectors: a third of the speed.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-split-loops")
#endif

// ---- helpers ----

static inline uint32_t fa_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float fa_from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

static inline float fa_from_bf16(uint16_t x) { return fa_from_bits(uint32_t{x} << 16); }

// Round to nearest even; a NaN stays a NaN.
static inline uint16_t fa_to_bf16(float x) {
  const uint32_t bits = fa_bits(x);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>((x != x ? 0x7fc00000u : rounded) >> 16);
}

// The build contracts nothing by itself; polynomials ask for it, where the CPU has it.
static inline float fa_fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__FP_FAST_FMAF)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// e^r - 1 = r + r^2 p(r) for |r| <= ln(2)/2; the fit's relative error is 1.4e-8.
static inline float fa_expm1_core(float r) {
  float p = 1.38825108e-3f;
  p = fa_fma(p, r, 8.36654752e-3f);
  p = fa_fma(p, r, 4.16672006e-2f);
  p = fa_fma(p, r, 1.66665435e-1f);
  p = fa_fma(p, r, 4.9999997e-1f);
  return fa_fma(p * r, r, r);
}

// 2^n for an integral n in [-126, 127]: a sum of 1.5 * 2^23 and n ends in n's own bits. A cast of NaN to an integer is undefined.
static inline float fa_pow2(float n) { return fa_from_bits((fa_bits(n + 0x1.8p23f) + 127u) << 23); }

// y 2^n in two steps, so that a subnormal result is rounded once and 2^128 is reached without overflow on the way.
static inline float fa_scale(float y, float n) {
  const float half = std::trunc(n * 0.5f);
  return y * fa_pow2(half) * fa_pow2(n - half);
}

// e^x to 1 ulp: x = n ln(2) + r with ln(2) in two parts. Beyond the clamps the result is 0 or Inf; a NaN fails both compares.
// Where it is 0 nothing subnormal is computed on the way: that made a softmax of half masked rows six times slower.
static inline float fa_exp(float x) {
  const bool is_zero = x < -104.0f;
  x = x > 89.0f ? 89.0f : x;
  x = is_zero ? 0.0f : x;
  const float n = std::rint(x * 1.44269504f);
  const float r = fa_fma(n, 2.12194440e-4f, fa_fma(n, -0.693359375f, x));
  const float result = fa_scale(1.0f + fa_expm1_core(r), n);
  return is_zero ? 0.0f : result;
}

// ---- kernel ----

// Threads start from this many elements on: below it they cost more than they save.
static constexpr int64_t kParallelFrom = 16384;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_causal_softmax_4d2abb(const uint16_t *__restrict x, uint16_t *__restrict out, int64_t n0,
        int64_t n1, int64_t cols, int64_t x_i0_stride, int64_t x_i1_stride, int64_t out_i0_stride,
        int64_t out_i1_stride, int threads) {
  const float scale = 0.08838834764831845f;
#pragma omp parallel num_threads(threads) if (n0 * n1 * cols >= kParallelFrom)
  {
    const std::unique_ptr<float[]> exponential_buffer(new float[cols]);
#pragma omp for collapse(2) schedule(static)
    for (int64_t i0 = 0; i0 < n0; ++i0) {
      for (int64_t i1 = 0; i1 < n1; ++i1) {
        const uint16_t *x_row = x + i0 * x_i0_stride + i1 * x_i1_stride;
        uint16_t *out_row = out + i0 * out_i0_stride + i1 * out_i1_stride;
        float row_max = -INFINITY;
        int row_max_has_nan = 0;
#pragma omp simd reduction(max : row_max) reduction(| : row_max_has_nan)
        for (int64_t col = 0; col < cols; ++col) {
          const bool is_at_most = col <= i1;
          const float x_value = fa_from_bf16(is_at_most ? x_row[col] : uint16_t{0});
          const float element = is_at_most ? x_value * scale : -INFINITY;
          row_max = element > row_max ? element : row_max;
          row_max_has_nan |= element != element;
        }
        if (row_max_has_nan) row_max = NAN;
        double row_sum = 0;
#pragma omp simd reduction(+ : row_sum)
        for (int64_t col = 0; col < cols; ++col) {
          const bool is_at_most = col <= i1;
          const float x_value = fa_from_bf16(is_at_most ? x_row[col] : uint16_t{0});
          const float difference = (is_at_most ? x_value * scale : -INFINITY) - row_max;
          const float exponential = fa_exp(difference);
          exponential_buffer[col] = exponential;
          row_sum += exponential;
        }
        const float inverse = 1.0f / static_cast<float>(row_sum);
#pragma omp simd
        for (int64_t col = 0; col < cols; ++col) {
          out_row[col] = fa_to_bf16(exponential_buffer[col] * inverse);
        }
      }
    }
  }
}
