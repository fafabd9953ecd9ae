// reglu_packed: reglu read from one packed gate/up tensor, in one pass
// Moves 100,663,296 bytes at 2048 x 4096: every input is read once and every output written once.
// Origin: library kernel reglu_packed, variant chunk
// Source: https://arxiv.org/abs/2002.05202
// Build: c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared

#include <cmath>
#include <cstdint>

// ---- helpers ----

// A NaN on either side wins, as in torch.
template <typename T>
static inline T fa_max(T a, T b) {
  return (a > b) | (a != a) ? a : b;
}

// ---- kernel ----

// Threads start from this many elements on: below it they cost more than they save.
static constexpr int64_t kParallelFrom = 32768;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_reglu_packed_144c8d(const float *__restrict packed, float *__restrict out, int64_t rows,
        int64_t cols, int64_t packed_0_row_stride, int64_t packed_1_row_stride, int64_t packed_1_offset,
        int64_t out_row_stride, int threads) {
  constexpr int64_t kBlock = 4096;
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads) if (rows * cols >= kParallelFrom)
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t start = 0; start < cols; start += kBlock) {
      const int64_t stop = start + kBlock < cols ? start + kBlock : cols;
      const float *packed_0_row = packed + row * packed_0_row_stride;
      const float *packed_1_row = packed + packed_1_offset + row * packed_1_row_stride;
      float *out_row = out + row * out_row_stride;
#pragma omp simd
      for (int64_t col = start; col < stop; ++col) {
        out_row[col] = fa_max(0.0f, packed_0_row[col]) * packed_1_row[col];
      }
    }
  }
}
