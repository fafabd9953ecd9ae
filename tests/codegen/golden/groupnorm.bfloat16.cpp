// groupnorm: normalise groups of channels; a group's channels are read as one row
// Moves 167,773,440 bytes at 32 x 32 x 40960: every input is read once and every output written once.
// Origin: library kernel groupnorm, variant builtin
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

// ---- kernel ----

// Threads start from this many elements on: below it they cost more than they save.
static constexpr int64_t kParallelFrom = 16384;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_groupnorm_ef2da0(const uint16_t *__restrict x, const uint16_t *__restrict weight,
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
        out_row[col] = fa_to_bf16(product * weight_value + bias_value);
      }
    }
  }
}
