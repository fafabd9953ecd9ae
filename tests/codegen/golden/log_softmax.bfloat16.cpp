// log_softmax: x - max - log(sum(exp)) over the last dim, the row read once
// Moves 33,554,432 bytes at 2048 x 4096: every input is read once and every output written once.
// Origin: library kernel log_softmax, variant builtin
// Source: https://arxiv.org/abs/1805.02867
// Build: c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

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

// log x = e ln(2) + log m with m in [sqrt(1/2), sqrt(2)), to 1 ulp; 0 gives -Inf and a negative number NaN.
static inline float fa_log(float x) {
  const bool subnormal = x < 0x1p-126f;
  const uint32_t bits = fa_bits(subnormal ? x * 0x1p23f : x) - 0x3f3504f3u;
  const float e = static_cast<float>(static_cast<int32_t>(bits) >> 23) - (subnormal ? 23.0f : 0.0f);
  const float f = fa_from_bits((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  float p = 6.74659163e-2f;
  p = fa_fma(p, f, -1.16756387e-1f);
  p = fa_fma(p, f, 1.18881777e-1f);
  p = fa_fma(p, f, -1.24055922e-1f);
  p = fa_fma(p, f, 1.42195508e-1f);
  p = fa_fma(p, f, -1.66679963e-1f);
  p = fa_fma(p, f, 2.00021192e-1f);
  p = fa_fma(p, f, -2.50000089e-1f);
  p = fa_fma(p, f, 3.33333135e-1f);
  const float square = f * f;
  const float tail = fa_fma(p * f, square, e * -2.12194440e-4f);
  const float result = fa_fma(e, 0.693359375f, fa_fma(-0.5f, square, tail) + f);
  const float edge = x == 0.0f ? -INFINITY : x < 0.0f ? NAN : x;
  return (x > 0.0f) & (x < INFINITY) ? result : edge;
}

// ---- kernel ----

// Threads start from this many elements on: below it they cost more than they save.
static constexpr int64_t kParallelFrom = 16384;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_log_softmax_bda7e9(const uint16_t *__restrict x, uint16_t *__restrict out, int64_t rows,
        int64_t cols, int64_t x_row_stride, int64_t out_row_stride, int threads) {
  constexpr int64_t kChunk = 256;  // columns summed in fp32 before fp64 takes over
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * cols >= kParallelFrom)
  for (int64_t row = 0; row < rows; ++row) {
    const uint16_t *x_row = x + row * x_row_stride;
    uint16_t *out_row = out + row * out_row_stride;
    float row_max = std::numeric_limits<float>::lowest();
    double row_sum = 0;
    int row_max_has_nan = 0;
    for (int64_t start = 0; start < cols; start += kChunk) {
      const int64_t stop = start + kChunk < cols ? start + kChunk : cols;
      float row_max_part = row_max;
#pragma omp simd reduction(max : row_max_part) reduction(| : row_max_has_nan)
      for (int64_t col = start; col < stop; ++col) {
        const float x_value = fa_from_bf16(x_row[col]);
        row_max_part = x_value > row_max_part ? x_value : row_max_part;
        row_max_has_nan |= x_value != x_value;
      }
      row_sum *= fa_exp(row_max - row_max_part);
      row_max = row_max_part;
      float row_sum_part = 0;
#pragma omp simd reduction(+ : row_sum_part)
      for (int64_t col = start; col < stop; ++col) {
        row_sum_part += fa_exp(fa_from_bf16(x_row[col]) - row_max);
      }
      row_sum += row_sum_part;
    }
    if (row_max_has_nan) row_max = NAN;
    if (row_sum == 0) row_max = -INFINITY;  // a row of -Inf alone
    if (row_sum == 0) row_sum = NAN;
    const float logarithm = fa_log(static_cast<float>(row_sum));
#pragma omp simd
    for (int64_t col = 0; col < cols; ++col) {
      out_row[col] = fa_to_bf16(fa_from_bf16(x_row[col]) - row_max - logarithm);
    }
  }
}
