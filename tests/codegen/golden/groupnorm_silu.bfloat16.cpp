// groupnorm_silu: normalise groups of channels and SiLU; a group's channels are read as one row
// Moves 167,773,440 bytes at 32 x 32 x 40960: every input is read once and every output written once.
// Origin: library kernel groupnorm_silu, variant builtin
// Source: https://arxiv.org/abs/1803.08494
// Build: c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared

#include <cmath>
#include <cstdint>
#include <cstring>

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

static inline float fa_sigmoid(float x) { return 1.0f / (1.0f + fa_exp(-x)); }

// ---- kernel ----

// Threads start from this many elements on: below it they cost more than they save.
static constexpr int64_t kParallelFrom = 8192;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_groupnorm_silu_0e8457(const uint16_t *__restrict x, const uint16_t *__restrict weight,
        const uint16_t *__restrict bias, uint16_t *__restrict out, int64_t n0, int64_t n1, int64_t cols,
        int64_t x_i0_stride, int64_t x_i1_stride, int64_t weight_i1_stride, int64_t bias_i1_stride,
        int64_t out_i0_stride, int64_t out_i1_stride, int64_t weight_extent, int threads) {
  const float eps = 1e-05f;
  constexpr int64_t kChunk = 256;  // columns summed in fp32 before fp64 takes over
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (n0 * n1 * cols >= kParallelFrom)
  for (int64_t i0 = 0; i0 < n0; ++i0) {
    for (int64_t i1 = 0; i1 < n1; ++i1) {
      const uint16_t *x_row = x + i0 * x_i0_stride + i1 * x_i1_stride;
      uint16_t *out_row = out + i0 * out_i0_stride + i1 * out_i1_stride;
      double row_sum = 0;
      for (int64_t start = 0; start < cols; start += kChunk) {
        const int64_t stop = start + kChunk < cols ? start + kChunk : cols;
        float row_sum_part = 0;
#pragma omp simd reduction(+ : row_sum_part)
        for (int64_t col = start; col < stop; ++col) {
          row_sum_part += fa_from_bf16(x_row[col]);
        }
        row_sum += row_sum_part;
      }
      const float mean = static_cast<float>(row_sum) / static_cast<float>(cols);
      double square_sum = 0;
      for (int64_t start = 0; start < cols; start += kChunk) {
        const int64_t stop = start + kChunk < cols ? start + kChunk : cols;
        float square_sum_part = 0;
#pragma omp simd reduction(+ : square_sum_part)
        for (int64_t col = start; col < stop; ++col) {
          const float centred = fa_from_bf16(x_row[col]) - mean;
          square_sum_part += centred * centred;
        }
        square_sum += square_sum_part;
      }
      const float variance = static_cast<float>(square_sum) / static_cast<float>(cols);
      const float inverse_root = 1.0f / std::sqrt(variance + eps);
#pragma omp simd
      for (int64_t col = 0; col < cols; ++col) {
        const float product = (fa_from_bf16(x_row[col]) - mean) * inverse_root;
        const int64_t quotient = col / weight_extent;
        const float weight_value = fa_from_bf16(weight[quotient + i1 * weight_i1_stride]);
        const float bias_value = fa_from_bf16(bias[quotient + i1 * bias_i1_stride]);
        const float sum = product * weight_value + bias_value;
        out_row[col] = fa_to_bf16(sum * fa_sigmoid(sum));
      }
    }
  }
}
