// reglu_packed: reglu read from one packed gate/up tensor, in one pass
// Moves 50,331,648 bytes at 2048 x 4096: every input is read once and every output written once.
// Origin: library kernel reglu_packed, variant chunk
// Source: https://arxiv.org/abs/2002.05202
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

// A NaN on either side wins, as in torch.
template <typename T>
static inline T fa_max(T a, T b) {
  return (a > b) | (a != a) ? a : b;
}

// ---- kernel ----

// Threads start from this many elements on: below it they cost more than they save.
static constexpr int64_t kParallelFrom = 32768;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_reglu_packed_e94141(const uint16_t *__restrict packed, uint16_t *__restrict out,
        int64_t rows, int64_t cols, int64_t packed_0_row_stride, int64_t packed_1_row_stride,
        int64_t packed_1_offset, int64_t out_row_stride, int threads) {
  constexpr int64_t kBlock = 4096;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (rows * cols >= kParallelFrom)
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t start = 0; start < cols; start += kBlock) {
      const int64_t stop = start + kBlock < cols ? start + kBlock : cols;
      const uint16_t *packed_0_row = packed + row * packed_0_row_stride;
      const uint16_t *packed_1_row = packed + packed_1_offset + row * packed_1_row_stride;
      uint16_t *out_row = out + row * out_row_stride;
#pragma omp simd
      for (int64_t col = start; col < stop; ++col) {
        const float larger = fa_max(0.0f, fa_from_bf16(packed_0_row[col]));
        out_row[col] = fa_to_bf16(larger * fa_from_bf16(packed_1_row[col]));
      }
    }
  }
}
