// qkv_heads_grouped: bias add, split and heads before the sequence in one pass over a packed projection with
// fewer key heads than query heads
// Moves 25,178,112 bytes at 32 x 1024 x 128: every input is read once and every output written once.
// Origin: library kernel qkv_heads_grouped, variant split
// Source: https://arxiv.org/abs/2305.13245
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
static constexpr int64_t kParallelFrom = 32768;

// Outputs must not overlap inputs. Sizes and strides count elements.
static void part1(const uint16_t *__restrict packed, const uint16_t *__restrict bias,
        uint16_t *__restrict query, int64_t n0, int64_t n1, int64_t cols, int64_t packed_i0_stride,
        int64_t packed_i1_stride, int64_t bias_i0_stride, int64_t query_i0_stride, int64_t query_i1_stride,
        int threads) {
  constexpr int64_t kBlock = 4096;
#pragma omp parallel for collapse(3) schedule(static) num_threads(threads) if (n0 * n1 * cols >= kParallelFrom)
  for (int64_t i0 = 0; i0 < n0; ++i0) {
    for (int64_t i1 = 0; i1 < n1; ++i1) {
      for (int64_t start = 0; start < cols; start += kBlock) {
        const int64_t stop = start + kBlock < cols ? start + kBlock : cols;
        const uint16_t *packed_row = packed + i0 * packed_i0_stride + i1 * packed_i1_stride;
        const uint16_t *bias_row = bias + i0 * bias_i0_stride;
        uint16_t *query_row = query + i0 * query_i0_stride + i1 * query_i1_stride;
#pragma omp simd
        for (int64_t col = start; col < stop; ++col) {
          query_row[col] = fa_to_bf16(fa_from_bf16(packed_row[col]) + fa_from_bf16(bias_row[col]));
        }
      }
    }
  }
}

static void part2(const uint16_t *__restrict packed, const uint16_t *__restrict bias,
        uint16_t *__restrict key, uint16_t *__restrict value, int64_t n0, int64_t n1, int64_t cols,
        int64_t packed_0_i0_stride, int64_t packed_0_i1_stride, int64_t packed_0_offset,
        int64_t bias_0_i0_stride, int64_t bias_0_offset, int64_t packed_1_i0_stride,
        int64_t packed_1_i1_stride, int64_t packed_1_offset, int64_t bias_1_i0_stride, int64_t bias_1_offset,
        int64_t key_i0_stride, int64_t key_i1_stride, int64_t value_i0_stride, int64_t value_i1_stride,
        int threads) {
  constexpr int64_t kBlock = 4096;
#pragma omp parallel for collapse(3) schedule(static) num_threads(threads) if (n0 * n1 * cols >= kParallelFrom)
  for (int64_t i0 = 0; i0 < n0; ++i0) {
    for (int64_t i1 = 0; i1 < n1; ++i1) {
      for (int64_t start = 0; start < cols; start += kBlock) {
        const int64_t stop = start + kBlock < cols ? start + kBlock : cols;
        const uint16_t *packed_0_row = packed + packed_0_offset + i0 * packed_0_i0_stride + i1 * packed_0_i1_stride;
        const uint16_t *bias_0_row = bias + bias_0_offset + i0 * bias_0_i0_stride;
        const uint16_t *packed_1_row = packed + packed_1_offset + i0 * packed_1_i0_stride + i1 * packed_1_i1_stride;
        const uint16_t *bias_1_row = bias + bias_1_offset + i0 * bias_1_i0_stride;
        uint16_t *key_row = key + i0 * key_i0_stride + i1 * key_i1_stride;
        uint16_t *value_row = value + i0 * value_i0_stride + i1 * value_i1_stride;
#pragma omp simd
        for (int64_t col = start; col < stop; ++col) {
          key_row[col] = fa_to_bf16(fa_from_bf16(packed_0_row[col]) + fa_from_bf16(bias_0_row[col]));
          value_row[col] = fa_to_bf16(fa_from_bf16(packed_1_row[col]) + fa_from_bf16(bias_1_row[col]));
        }
      }
    }
  }
}

extern "C" void fa_qkv_heads_grouped_5e8133(const uint16_t *__restrict packed,
        const uint16_t *__restrict bias, uint16_t *__restrict query, uint16_t *__restrict key,
        uint16_t *__restrict value, int64_t n0_of_1, int64_t n1_of_1, int64_t cols_of_1,
        int64_t packed_i0_stride_of_1, int64_t packed_i1_stride_of_1, int64_t bias_i0_stride_of_1,
        int64_t query_i0_stride_of_1, int64_t query_i1_stride_of_1, int64_t n0_of_2, int64_t n1_of_2,
        int64_t cols_of_2, int64_t packed_0_i0_stride_of_2, int64_t packed_0_i1_stride_of_2,
        int64_t packed_0_offset_of_2, int64_t bias_0_i0_stride_of_2, int64_t bias_0_offset_of_2,
        int64_t packed_1_i0_stride_of_2, int64_t packed_1_i1_stride_of_2, int64_t packed_1_offset_of_2,
        int64_t bias_1_i0_stride_of_2, int64_t bias_1_offset_of_2, int64_t key_i0_stride_of_2,
        int64_t key_i1_stride_of_2, int64_t value_i0_stride_of_2, int64_t value_i1_stride_of_2, int threads) {
  part1(packed, bias, query, n0_of_1, n1_of_1, cols_of_1, packed_i0_stride_of_1, packed_i1_stride_of_1,
        bias_i0_stride_of_1, query_i0_stride_of_1, query_i1_stride_of_1, threads);
  part2(packed, bias, key, value, n0_of_2, n1_of_2, cols_of_2, packed_0_i0_stride_of_2, packed_0_i1_stride_of_2,
        packed_0_offset_of_2, bias_0_i0_stride_of_2, bias_0_offset_of_2, packed_1_i0_stride_of_2,
        packed_1_i1_stride_of_2, packed_1_offset_of_2, bias_1_i0_stride_of_2, bias_1_offset_of_2, key_i0_stride_of_2,
        key_i1_stride_of_2, value_i0_stride_of_2, value_i1_stride_of_2, threads);
}
