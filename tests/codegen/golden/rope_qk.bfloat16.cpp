// rope_qk: rotary position embedding of queries and keys in one launch, read where they lie in their projections
// Moves 42,991,616 bytes at 2048 x 32 x 64: every input is read once and every output written once.
// Origin: library kernel rope_qk, variant rotate_half
// Source: https://arxiv.org/abs/2104.09864
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
static void part1(const uint16_t *__restrict q, const uint16_t *__restrict cos,
        const uint16_t *__restrict sin, uint16_t *__restrict q_out, int64_t n0, int64_t n1, int64_t cols,
        int64_t q_0_i0_stride, int64_t q_0_i1_stride, int64_t q_1_i0_stride, int64_t q_1_i1_stride,
        int64_t q_1_offset, int64_t cos_0_i0_stride, int64_t cos_1_i0_stride, int64_t cos_1_offset,
        int64_t sin_0_i0_stride, int64_t sin_1_i0_stride, int64_t sin_1_offset, int64_t q_out_0_i0_stride,
        int64_t q_out_0_i1_stride, int64_t q_out_1_i0_stride, int64_t q_out_1_i1_stride,
        int64_t q_out_1_offset, int threads) {
  constexpr int64_t kBlock = 4096;
#pragma omp parallel for collapse(3) schedule(static) num_threads(threads) if (n0 * n1 * cols >= kParallelFrom)
  for (int64_t i0 = 0; i0 < n0; ++i0) {
    for (int64_t i1 = 0; i1 < n1; ++i1) {
      for (int64_t start = 0; start < cols; start += kBlock) {
        const int64_t stop = start + kBlock < cols ? start + kBlock : cols;
        const uint16_t *q_0_row = q + i0 * q_0_i0_stride + i1 * q_0_i1_stride;
        const uint16_t *q_1_row = q + q_1_offset + i0 * q_1_i0_stride + i1 * q_1_i1_stride;
        const uint16_t *cos_0_row = cos + i0 * cos_0_i0_stride;
        const uint16_t *cos_1_row = cos + cos_1_offset + i0 * cos_1_i0_stride;
        const uint16_t *sin_0_row = sin + i0 * sin_0_i0_stride;
        const uint16_t *sin_1_row = sin + sin_1_offset + i0 * sin_1_i0_stride;
        uint16_t *q_out_0_row = q_out + i0 * q_out_0_i0_stride + i1 * q_out_0_i1_stride;
        uint16_t *q_out_1_row = q_out + q_out_1_offset + i0 * q_out_1_i0_stride + i1 * q_out_1_i1_stride;
#pragma omp simd
        for (int64_t col = start; col < stop; ++col) {
          const float q_value = fa_from_bf16(q_0_row[col]);
          const float q_value_2 = fa_from_bf16(q_1_row[col]);
          const float product = -q_value_2 * fa_from_bf16(sin_0_row[col]);
          const float product_2 = q_value_2 * fa_from_bf16(cos_1_row[col]);
          q_out_0_row[col] = fa_to_bf16(q_value * fa_from_bf16(cos_0_row[col]) + product);
          q_out_1_row[col] = fa_to_bf16(product_2 + q_value * fa_from_bf16(sin_1_row[col]));
        }
      }
    }
  }
}

extern "C" void fa_rope_qk_bec210(const uint16_t *__restrict q, const uint16_t *__restrict cos,
        const uint16_t *__restrict sin, const uint16_t *__restrict k, uint16_t *__restrict q_out,
        uint16_t *__restrict k_out, int64_t n0_of_1, int64_t n1_of_1, int64_t cols_of_1,
        int64_t q_0_i0_stride_of_1, int64_t q_0_i1_stride_of_1, int64_t q_1_i0_stride_of_1,
        int64_t q_1_i1_stride_of_1, int64_t q_1_offset_of_1, int64_t cos_0_i0_stride_of_1,
        int64_t cos_1_i0_stride_of_1, int64_t cos_1_offset_of_1, int64_t sin_0_i0_stride_of_1,
        int64_t sin_1_i0_stride_of_1, int64_t sin_1_offset_of_1, int64_t q_out_0_i0_stride_of_1,
        int64_t q_out_0_i1_stride_of_1, int64_t q_out_1_i0_stride_of_1, int64_t q_out_1_i1_stride_of_1,
        int64_t q_out_1_offset_of_1, int64_t n0_of_2, int64_t n1_of_2, int64_t cols_of_2,
        int64_t k_0_i0_stride_of_2, int64_t k_0_i1_stride_of_2, int64_t k_1_i0_stride_of_2,
        int64_t k_1_i1_stride_of_2, int64_t k_1_offset_of_2, int64_t cos_0_i0_stride_of_2,
        int64_t cos_1_i0_stride_of_2, int64_t cos_1_offset_of_2, int64_t sin_0_i0_stride_of_2,
        int64_t sin_1_i0_stride_of_2, int64_t sin_1_offset_of_2, int64_t k_out_0_i0_stride_of_2,
        int64_t k_out_0_i1_stride_of_2, int64_t k_out_1_i0_stride_of_2, int64_t k_out_1_i1_stride_of_2,
        int64_t k_out_1_offset_of_2, int threads) {
  part1(q, cos, sin, q_out, n0_of_1, n1_of_1, cols_of_1, q_0_i0_stride_of_1, q_0_i1_stride_of_1,
        q_1_i0_stride_of_1, q_1_i1_stride_of_1, q_1_offset_of_1, cos_0_i0_stride_of_1, cos_1_i0_stride_of_1,
        cos_1_offset_of_1, sin_0_i0_stride_of_1, sin_1_i0_stride_of_1, sin_1_offset_of_1, q_out_0_i0_stride_of_1,
        q_out_0_i1_stride_of_1, q_out_1_i0_stride_of_1, q_out_1_i1_stride_of_1, q_out_1_offset_of_1, threads);
  part1(k, cos, sin, k_out, n0_of_2, n1_of_2, cols_of_2, k_0_i0_stride_of_2, k_0_i1_stride_of_2,
        k_1_i0_stride_of_2, k_1_i1_stride_of_2, k_1_offset_of_2, cos_0_i0_stride_of_2, cos_1_i0_stride_of_2,
        cos_1_offset_of_2, sin_0_i0_stride_of_2, sin_1_i0_stride_of_2, sin_1_offset_of_2, k_out_0_i0_stride_of_2,
        k_out_0_i1_stride_of_2, k_out_1_i0_stride_of_2, k_out_1_i1_stride_of_2, k_out_1_offset_of_2, threads);
}
