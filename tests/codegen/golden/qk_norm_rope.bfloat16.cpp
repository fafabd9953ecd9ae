// qk_norm_rope: per-head RMSNorm and rotary embedding, in one pass, x read where the projection wrote it
// Moves 34,603,264 bytes at 2048 x 32 x 64: every input is read once and every output written once.
// Origin: library kernel qk_norm_rope, variant llama
// Source: https://arxiv.org/abs/2505.09388
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

static inline float fa_round_bf16(float x) { return fa_from_bf16(fa_to_bf16(x)); }

// ---- kernel ----

// Threads start from this many elements on: below it they cost more than they save.
static constexpr int64_t kParallelFrom = 8192;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_qk_norm_rope_663f41(const uint16_t *__restrict weight, const uint16_t *__restrict x,
        const uint16_t *__restrict cos, const uint16_t *__restrict sin, uint16_t *__restrict out, int64_t n0,
        int64_t n1, int64_t cols, int64_t weight_1_offset, int64_t x_0_i0_stride, int64_t x_0_i1_stride,
        int64_t x_1_i0_stride, int64_t x_1_i1_stride, int64_t x_1_offset, int64_t cos_0_i0_stride,
        int64_t cos_1_i0_stride, int64_t cos_1_offset, int64_t sin_0_i0_stride, int64_t sin_1_i0_stride,
        int64_t sin_1_offset, int64_t out_0_i0_stride, int64_t out_0_i1_stride, int64_t out_1_i0_stride,
        int64_t out_1_i1_stride, int64_t out_1_offset, int threads) {
  const float eps = 1e-06f;
  constexpr int64_t kChunk = 256;  // columns summed in fp32 before fp64 takes over
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (n0 * n1 * cols >= kParallelFrom)
  for (int64_t i0 = 0; i0 < n0; ++i0) {
    for (int64_t i1 = 0; i1 < n1; ++i1) {
      const uint16_t *x_0_row = x + i0 * x_0_i0_stride + i1 * x_0_i1_stride;
      const uint16_t *x_1_row = x + x_1_offset + i0 * x_1_i0_stride + i1 * x_1_i1_stride;
      const uint16_t *weight_1_row = weight + weight_1_offset;
      const uint16_t *cos_0_row = cos + i0 * cos_0_i0_stride;
      const uint16_t *cos_1_row = cos + cos_1_offset + i0 * cos_1_i0_stride;
      const uint16_t *sin_0_row = sin + i0 * sin_0_i0_stride;
      const uint16_t *sin_1_row = sin + sin_1_offset + i0 * sin_1_i0_stride;
      uint16_t *out_0_row = out + i0 * out_0_i0_stride + i1 * out_0_i1_stride;
      uint16_t *out_1_row = out + out_1_offset + i0 * out_1_i0_stride + i1 * out_1_i1_stride;
      double row_sum = 0;
      for (int64_t start = 0; start < cols; start += kChunk) {
        const int64_t stop = start + kChunk < cols ? start + kChunk : cols;
        float row_sum_part = 0;
#pragma omp simd reduction(+ : row_sum_part)
        for (int64_t col = start; col < stop; ++col) {
          const float x_value = fa_from_bf16(x_0_row[col]);
          const float x_value_2 = fa_from_bf16(x_1_row[col]);
          row_sum_part += x_value * x_value + x_value_2 * x_value_2;
        }
        row_sum += row_sum_part;
      }
      const float mean = static_cast<float>(row_sum) / (2.0f * static_cast<float>(cols));
      const float inverse_root = 1.0f / std::sqrt(eps + mean);
#pragma omp simd
      for (int64_t col = 0; col < cols; ++col) {
        const float rounded = fa_round_bf16(fa_from_bf16(x_0_row[col]) * inverse_root);
        const float rounded_2 = fa_round_bf16(fa_from_bf16(x_1_row[col]) * inverse_root);
        const float product = fa_from_bf16(weight[col]) * rounded;
        const float product_2 = fa_from_bf16(weight_1_row[col]) * rounded_2;
        const float product_3 = -product_2 * fa_from_bf16(sin_0_row[col]);
        const float product_4 = product_2 * fa_from_bf16(cos_1_row[col]);
        out_0_row[col] = fa_to_bf16(product * fa_from_bf16(cos_0_row[col]) + product_3);
        out_1_row[col] = fa_to_bf16(product_4 + product * fa_from_bf16(sin_1_row[col]));
      }
    }
  }
}
