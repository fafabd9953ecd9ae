// rope: rotary position embedding: x * cos + rotate_half(x) * sin, x read where it lies in the projection
// Moves 69,206,016 bytes at 2048 x 32 x 64: every input is read once and every output written once.
// Origin: library kernel rope, variant rotate_half
// Source: https://arxiv.org/abs/2104.09864
// Build: c++ -std=c++17 -O3 -march=native -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC -shared

#include <cmath>
#include <cstdint>

// Threads start from this many elements on: below it they cost more than they save.
static constexpr int64_t kParallelFrom = 16384;

// Outputs must not overlap inputs. Sizes and strides count elements.
extern "C" void fa_rope_236486(const float *__restrict x, const float *__restrict cos,
        const float *__restrict sin, float *__restrict out, int64_t n0, int64_t n1, int64_t cols,
        int64_t x_0_i0_stride, int64_t x_0_i1_stride, int64_t x_1_i0_stride, int64_t x_1_i1_stride,
        int64_t x_1_offset, int64_t cos_0_i0_stride, int64_t cos_1_i0_stride, int64_t cos_1_offset,
        int64_t sin_0_i0_stride, int64_t sin_1_i0_stride, int64_t sin_1_offset, int64_t out_0_i0_stride,
        int64_t out_0_i1_stride, int64_t out_1_i0_stride, int64_t out_1_i1_stride, int64_t out_1_offset,
        int threads) {
  constexpr int64_t kBlock = 4096;
#pragma omp parallel for collapse(3) schedule(static) num_threads(threads) if (n0 * n1 * cols >= kParallelFrom)
  for (int64_t i0 = 0; i0 < n0; ++i0) {
    for (int64_t i1 = 0; i1 < n1; ++i1) {
      for (int64_t start = 0; start < cols; start += kBlock) {
        const int64_t stop = start + kBlock < cols ? start + kBlock : cols;
        const float *x_0_row = x + i0 * x_0_i0_stride + i1 * x_0_i1_stride;
        const float *x_1_row = x + x_1_offset + i0 * x_1_i0_stride + i1 * x_1_i1_stride;
        const float *cos_0_row = cos + i0 * cos_0_i0_stride;
        const float *cos_1_row = cos + cos_1_offset + i0 * cos_1_i0_stride;
        const float *sin_0_row = sin + i0 * sin_0_i0_stride;
        const float *sin_1_row = sin + sin_1_offset + i0 * sin_1_i0_stride;
        float *out_0_row = out + i0 * out_0_i0_stride + i1 * out_0_i1_stride;
        float *out_1_row = out + out_1_offset + i0 * out_1_i0_stride + i1 * out_1_i1_stride;
#pragma omp simd
        for (int64_t col = start; col < stop; ++col) {
          const float x_value = x_0_row[col];
          const float x_value_2 = x_1_row[col];
          out_0_row[col] = x_value * cos_0_row[col] + -x_value_2 * sin_0_row[col];
          out_1_row[col] = x_value_2 * cos_1_row[col] + x_value * sin_1_row[col];
        }
      }
    }
  }
}
